"""The report as JUnit XML, in the dialect that services for continuous integration read.

A suite is an operation, a class is a clause, a test is a case. What a backend does not declare is *skipped*, with the
reason; the counts *passed / declared / specified* stand among the properties of each suite.
"""

from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from lowbit.system.storage import write_whole
from lowbit_conformance.isolation.methods import ADVISORY, ISOLATION
from lowbit_conformance.report.model import Report
from lowbit_conformance.suite.tally import Row, Verdict


def write_junit(report: Report, path: Path) -> None:
    """Write the report as JUnit XML, to a complete file or none."""
    root = as_xml(report)
    ElementTree.indent(root)
    write_whole(path, ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n")


def as_xml(report: Report) -> Element:
    """The element ``testsuites`` for a report."""
    total = report.tally.total()
    root = Element("testsuites", {"name": f"lowbit conformance of {report.build.name}"} | _counts(total))
    root.set("time", f"{report.seconds:.3f}")
    for row in report.tally.rows():
        verdicts = [verdict for verdict in report.tally.verdicts if verdict.operation == row.operation]
        started = report.started.removesuffix("+00:00")
        suite = SubElement(root, "testsuite", {"name": row.operation, "timestamp": started} | _counts(row))
        suite.set("skipped", str(row.specified - row.declared))
        suite.set("time", f"{sum(verdict.seconds or 0 for verdict in verdicts):.3f}")
        properties = SubElement(suite, "properties")
        for name, value in _properties(report, row).items():
            SubElement(properties, "property", name=name, value=value)
        for verdict in verdicts:
            _add_case(suite, report, verdict)
    if report.tally.certificates:
        _add_certificates(root, report)
    return root


def _add_certificates(root: Element, report: Report) -> None:
    """Add a suite for the profiles; its counts are separate from those of the cases."""
    certificates = report.tally.certificates
    refused = sum(not certificate.certified for certificate in certificates)
    counts = {"tests": str(len(certificates)), "failures": str(refused), "errors": "0"}
    suite = SubElement(root, "testsuite", {"name": "profiles"} | counts)
    for certificate in certificates:
        case = SubElement(suite, "testcase", classname="profiles", name=certificate.profile)
        if not certificate.certified:
            failure = SubElement(case, "failure", type="NOT_CERTIFIED", message=str(certificate))
            failure.text = "\n".join(certificate.missing)
    for name in ("tests", "failures"):
        root.set(name, str(int(root.get(name, "0")) + int(counts[name])))


def _counts(row: Row) -> dict[str, str]:
    return {"tests": str(row.specified), "failures": str(row.declared - row.passed), "errors": "0"}


def _properties(report: Report, row: Row) -> dict[str, str]:
    return {
        "passed": str(row.passed),
        "declared": str(row.declared),
        "specified": str(row.specified),
        "bound used": row.shown_share,
        "backend": f"{report.build.name} {report.build.version}".strip(),
        "suite": report.suite.version,
        "cpu": report.machine.cpu,
        "isolation": ISOLATION[report.tally.isolation],
        "seal": ADVISORY,
        "report id": report.id,
    }


def _add_case(suite: Element, report: Report, verdict: Verdict) -> None:
    case = SubElement(suite, "testcase", classname=verdict.clause, name=verdict.id)
    case.set("time", f"{verdict.seconds or 0:.3f}")
    if verdict.outcome == "not declared":
        SubElement(case, "skipped", message=f"not declared: {verdict.message}")
    elif verdict.outcome == "failed":
        failure = SubElement(case, "failure", type=verdict.verdict, message=verdict.message)
        lines = [verdict.message, verdict.diagnosis, f"reproduce: {report.reproduce(verdict)}"]
        failure.text = "\n".join(line for line in lines if line)
