"""The report of `lowbit bench`: what its lines say, and that nothing in a name is obeyed."""

from typing import Any

from rich.console import Console

from lowbit_bench.report import figure_of, headings_of, page_of, show, style_of, texts_of
from lowbit_bench.targets import libraries


def row(name: str, seconds: float, rounds: int = 8) -> dict[str, Any]:
    times = {"seconds": [seconds, seconds / 2, 2 * seconds], "share": [0.5, 0.4, 0.6], "runs": [seconds] * rounds}
    return {"backend": name, "bytes": 10**6, "read_seconds": 1e-4, "bytes_per_second": 1e9, "checked": True} | times


def answer(*rows: dict[str, Any], **others: Any) -> dict[str, Any]:
    problem = {"id": "linear.qgemv 64x96", "rows": rows, "rounds": 8, "free": 8, "problem": {}}
    rest = {"threads": 1, "rounds": 1, "started": "now", "absent": [], "verdicts": {}, "repeat": {}}
    return {"machine": {"cpu": "a processor"}, "problems": [problem], **rest, **others}


def test_what_failed_is_last_and_compared_with_nothing() -> None:
    """Though it is the fastest; the report says how to repeat it, and the picture shows it otherwise."""
    repeat = {"wrong": "lowbit conformance wrong --op linear.qgemv"}
    given = answer(row("wrong", 0.001), row("right", 0.002), row("slow", 0.004), repeat=repeat)
    first, heading, columns, *rows, last = [str(each) for each in texts_of(given, 200)]
    assert (first, heading) == ("a processor, 1 thread, 1 round", "\nlinear.qgemv 64x96, 8 of 8 rounds free")
    assert [line.split()[0] for line in rows] == ["right", "slow", "wrong"]
    assert [line.split()[4] for line in rows] == ["1.00", "2.00", "-"]
    assert last == "did not pass: wrong; to see why: lowbit conformance wrong --op linear.qgemv"
    assert "95 % from" in columns and "to see why" in page_of(given, [])
    assert figure_of(given).startswith(b"\x89PNG") and "hatch" in style_of(0, True)


def test_few_rounds_have_no_interval() -> None:
    """Of five times, the least and the greatest hold the median with less than 95 %."""
    five, six = (answer(row("one", 0.001, rounds))["problems"][0] for rounds in (5, 6))
    assert headings_of(five)[2:4] == ("least", "greatest") and headings_of(six)[2:4] == ("95 % from", "to")


def test_a_share_that_cannot_be_right_is_reported() -> None:
    """In the text and on the page; small numbers keep two digits."""
    fast = row("fast", 0.001) | {"share": [1.3, 1.2, 1.4]}
    slow = row("slow", 0.001) | {"share": [0.0012, 0.001, 0.002], "bytes_per_second": 3.4e6}
    lines = [str(each) for each in texts_of(answer(fast, slow), 200)]
    assert lines[4].split()[5:7] == ["0.0034", "0.0012"]
    said = "linear.qgemv 64x96: a share above 1.2; reading was disturbed, or caches hold a part of the matrix"
    assert lines[-1] == said and said in page_of(answer(fast), []) and "1.2;" not in page_of(answer(slow), [])


def test_names_are_shown_as_they_are() -> None:
    """No markup, no emoji, no control characters."""
    console = Console(width=200, force_terminal=False, record=True)
    absent = [{"name": "[red]:smile:", "problem": "", "reason": "[/bold] \x1b[31m"}]
    show(answer(row("[bold]:smile:[/bold]", 0.001), absent=absent), console)
    text = console.export_text()
    assert "[bold]:smile:[/bold]" in text and "not measured: [red]:smile:: [/bold] \\x1b[31m" in text


def test_numbers_are_whole_on_a_narrow_terminal() -> None:
    """Names lose their beginnings, unless two would then look the same."""
    long = "./a/very/long/path/to/a/program --with --many --options"
    lines = [str(each) for each in texts_of(answer(row(f"{long} 1", 1.5), row(f"{long} 2", 123.4567)), 40)]
    assert [line.split()[-7:-2] for line in lines[3:5]] == [
        ["750.000", "3000.000", "1.00", "1.0", "0.50"],
        ["61728.350", "246913.400", "82.30", "1.0", "0.50"],
    ]
    assert [line.split()[:2] for line in lines[3:5]] == [["…--options", "1"], ["…--options", "2"]]
    same = [str(each) for each in texts_of(answer(row(f"1 {long}", 1.5), row(f"2 {long}", 1.6)), 40)]
    assert [line[:3] for line in same[3:5]] == ["1 .", "2 ."]


def test_libraries_of_one_file_name_are_told_apart() -> None:
    """Also from other backends, and a library that is given twice is one."""
    shown = [each.shown for each in libraries(["/a/numpy", "/b/libk.so", "/c/libk.so", "/b/libk.so"], ["numpy"])]
    assert shown == ["a/numpy", "b/libk.so", "c/libk.so"]
