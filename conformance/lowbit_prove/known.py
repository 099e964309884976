"""What is known: which theorems hold for a kernel or a backend, by certificates of earlier proofs.

A certificate counts only if it is for the program as it is generated today, for today's code and for this solver
(`certificates.kept`); nothing is proved here. `lowbit.theorems` finds this chapter by its entry point, and ``lowbit
kernel show`` and the reports of the suite say what it knows. Most reports are about backends without theorems, so
whatever needs the solver is imported only for the others.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from lowbit.errors import ArgumentError
from lowbit.theorems import Known

if TYPE_CHECKING:
    from lowbit_prove.theorem import Theorem

CPPYY = "lowbit_cppyy:CppyyBackend"
CUDA = "lowbit_cuda.backend:CudaBackend"
OF_BACKENDS = {CPPYY: ("casts", "steps", "storage"), CUDA: ("graphs", "offload")}
"""For each entry point, the kinds of theorems about the whole backend; theorems about its kernels name their table."""


class KnownProofs:
    """The prover as `lowbit.theorems` discovers it."""

    def of_kernel(self, name: str) -> list[Known]:
        """The theorems about a kernel; none without the solver."""
        try:
            from lowbit_prove import catalogue

            return known(catalogue.chosen([name]))
        except (ArgumentError, ImportError):
            return []

    def of_backend(self, entry: str, details: Mapping[str, object]) -> list[Known]:
        """The theorems about a backend and the kernels of its instruction set; none without the solver."""
        if entry not in OF_BACKENDS:
            return []
        try:
            from lowbit_prove import catalogue, certificates
        except ImportError:
            return []
        if not certificates.any_kept():
            return []
        kinds = OF_BACKENDS[entry]
        table = f"_{details['instruction set']}" if "instruction set" in details else None
        named = [each for each in catalogue.theorems() if table is not None and each.name.endswith(table)]
        return known([*named, *(each for each in catalogue.theorems() if each.kind in kinds)])


def known(theorems: Iterable["Theorem"]) -> list[Known]:
    """What certificates say about theorems."""
    from lowbit_prove import certificates

    found = []
    for each in theorems:
        proof = certificates.kept(certificates.certificate(each))
        how = "" if proof is None else f"{proof.steps} steps by {proof.by}, {certificates.solver()}"
        found.append(Known(each.id, each.statement, how))
    return found
