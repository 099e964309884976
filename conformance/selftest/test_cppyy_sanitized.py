"""The generated C++ under g++'s sanitizers: no read or write outside an array, no undefined behaviour, no data race.

The same text that cppyy compiles is compiled by g++ into a small program, which reads cases and writes results. Every
array has exactly its size, so the sanitizer sees an access of one element too many. And the results must have the same
bits as those of cppyy's compiler: what a kernel computes does not depend on who compiled it.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from lowbit.affine import CONVENTIONS, Floats, QuantizedMatrix, quantize
from lowbit.packing import BITS, CODES_PER_UNIT
from lowbit_cppyy import CppyyBackend, processor
from lowbit_cppyy.isa import TABLES, InstructionSet
from lowbit_cppyy.kernels import OPERATIONS, PANEL, Kernel
from lowbit_cppyy.layout import PanelLayout
from lowbit_cppyy.lowering import prelude

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

HEADERS = Path(str(files("lowbit_cppyy"))) / "cpp"
HERE = [table for table in TABLES.values() if all(map(processor.has, table.requires))]
"""The instruction sets of this processor."""

# A case on standard input: the sizes of a Linear and of x as int64, then units, stream and x. The answer is Y.
DRIVER = """
#include <cstdio>
#include <vector>
#include "linear.h"

template <class T> std::vector<T> read(std::int64_t n) {
  std::vector<T> values(n);
  values.shrink_to_fit();
  if (std::fread(values.data(), sizeof(T), n, stdin) != std::size_t(n)) std::abort();
  return values;
}

int main(int, char** arguments) {
  lowbit::Pool pool(std::atoi(arguments[1]));
  std::int64_t n[13];
  while (std::fread(n, sizeof n, 1, stdin) == 1) {
    const auto units = read<std::int32_t>(n[3]);
    const auto stream = read<std::uint32_t>(n[8]);
    const auto x = read<float>(n[9] * n[0]);
    std::vector<float> y(n[9] * n[1]);
    const lowbit::Linear linear{stream.data(), units.data(), n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7],
                                &kernels[n[10]], &kernels[n[11]], &pool};
    if (lowbit::multiply(linear, x.data(), y.data(), n[9]) != lowbit::OK) return 3;
    std::fwrite(y.data(), sizeof(float), y.size(), stdout);
  }
}
"""


def compiled(folder: Path, name: str, source: str, *options: str) -> Path:
    """Compile a program with g++."""
    (folder / f"{name}.cpp").write_text(source)
    command = [str(COMPILER), "-std=c++17", f"-I{HEADERS}", "-pthread", "-ffp-contract=off", "-Wno-psabi", *options]
    subprocess.run([*command, f"{name}.cpp", "-o", name], cwd=folder, check=True, timeout=300)
    return folder / name


def kernels_of(tables: Sequence[InstructionSet]) -> list[Kernel]:
    return [Kernel(operation, bits, table) for table in tables for bits in BITS for operation in OPERATIONS]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for all widths of code and all instruction sets of this processor, with two sanitizers."""
    table = ",\n".join(f"{{&lowbit::{k.table.name}::{k.name}, {k.rows}, {k.columns}}}" for k in kernels_of(HERE))
    source = "".join(map(prelude, HERE)) + "".join(kernel.source for kernel in kernels_of(HERE))
    source += f'#include "linear.h"\nconst lowbit::Kernel kernels[] = {{{table}}};\n' + DRIVER
    options = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return compiled(tmp_path_factory.mktemp("sanitized"), "driver", source, *options)


def case(matrix: QuantizedMatrix, x: Floats, table: InstructionSet, *, short: int = 0) -> bytes:
    """One case for the driver; the stream may be cut short by some elements, to see that it is noticed."""
    layout = PanelLayout.of(matrix, PANEL)
    stream = layout.apply(matrix).reshape(-1)
    stream = stream[: stream.size - short]
    kernels = [kernels_of(HERE).index(Kernel(operation, matrix.bits, table)) for operation in OPERATIONS]
    sizes = [layout.rows, layout.columns, layout.group_size, layout.groups, layout.panel, layout.panel_words]
    sizes += [layout.unit_codes, layout.x_length, stream.size, len(x), *kernels, 0]
    parts = (np.array(sizes, np.int64), np.array(layout.units, np.int32), stream, x)
    return b"".join(part.tobytes() for part in parts)


def answer(driver: Path, cases: Sequence[bytes], threads: int = 3) -> subprocess.CompletedProcess[bytes]:
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=0",
    }
    return subprocess.run(
        [driver, str(threads)], input=b"".join(cases), capture_output=True, timeout=120, check=False, env=environment
    )


def some_matrix(bits: int, rows: int, columns: int, group_size: int, seed: int) -> QuantizedMatrix:
    weights = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return quantize(weights, bits=bits, group_size=group_size, convention=CONVENTIONS[seed % 2])


@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
def test_every_access_is_inside_its_array(driver: Path, table: InstructionSet) -> None:
    """Tails in K, N, T and groups: nothing is read or written outside, and the bits are those of the backend."""
    cases, expected = [], []
    with CppyyBackend(table.name, threads=1) as backend:
        for bits in BITS:
            unit = CODES_PER_UNIT[bits]
            for seed, (rows, columns) in enumerate(
                ((unit, 1), (3 * unit, PANEL), (7 * unit, 2 * PANEL + 1), (224, 77))
            ):
                for group_size in {min(size, rows) for size in (1, 3, 16, 32, 100, rows)}:
                    matrix = some_matrix(bits, rows, columns, group_size, seed)
                    prepared = backend.prepare(matrix)
                    for count in (1, 2, 5):
                        x = np.random.default_rng(seed).standard_normal((count, rows)).astype(np.float32)
                        cases.append(case(matrix, x, table))
                        expected.append(prepared.qgemm(x).tobytes())
    result = answer(driver, cases)
    assert result.returncode == 0, result.stderr.decode()[:2000]
    assert result.stdout == b"".join(expected)


@pytest.mark.parametrize("table", HERE, ids=lambda table: table.name)
def test_the_sanitizer_notices_a_stream_that_is_one_element_short(driver: Path, table: InstructionSet) -> None:
    """The test above can fail: with a single element less than the layout says, the driver stops."""
    x = np.ones((1, 96), np.float32)
    for bits in BITS:
        result = answer(driver, [case(some_matrix(bits, 96, 40, 32, 0), x, table, short=1)])
        assert result.returncode != 0
        assert b"AddressSanitizer" in result.stderr


RACE = """
#include <cstdio>
#include "pool.h"
struct Sum { std::atomic<long> total{0}; long cells[4096]; };
void body(const void* context, std::int64_t first, std::int64_t last) {
  Sum* sum = static_cast<Sum*>(const_cast<void*>(context));
  for (std::int64_t i = first; i < last; ++i) { sum->cells[i] += i; sum->total += i; }
}
int main() {
  for (int round = 0; round < 10; ++round) {
    lowbit::Pool pool(4);
    std::vector<std::thread> callers;
    for (int n = 0; n < 3; ++n)
      callers.emplace_back([&pool] {
        for (int call = 0; call < 40; ++call) {
          Sum sum{};
          const lowbit::Status status = pool.run(4096, 1 + call * 16, call % 3, body, &sum);
          if (status == lowbit::OK && sum.total != 4096l * 4095 / 2) std::abort();
          if (call % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
      });
    if (round % 2) pool.stop();
    for (std::thread& caller : callers) caller.join();
  }
  std::puts("no race");
}
"""


def race_reports(folder: Path, pool: str) -> Iterator[str]:
    """What ThreadSanitizer says of the pool in this header, run after run; without a report, the last words."""
    (folder / "pool.h").write_text(pool)
    command = [str(compiled(folder, "race", RACE, "-O1", "-fsanitize=thread"))]
    if shutil.which("setarch"):  # the sanitizer needs an address space that is not randomised too far
        command = ["setarch", "-R", *command]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    while True:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        if "unexpected memory mapping" in result.stderr:
            pytest.skip("this kernel's address space layout is not one that ThreadSanitizer can use")
        yield result.stdout if result.returncode == 0 else result.stderr


def test_the_pool_has_no_data_race(tmp_path: Path) -> None:
    """Calls from three threads at once, workers that sleep and wake, and a stop in between, under ThreadSanitizer."""
    reports = race_reports(tmp_path, (HEADERS / "pool.h").read_text())
    assert list(islice(reports, 2)) == ["no race\n"] * 2


def test_the_sanitizer_notices_a_pool_that_stops_in_the_middle_of_a_call(tmp_path: Path) -> None:
    """The test above can fail: where `stop` does not wait for calls under way, a race is reported sooner or later."""
    pool = (HEADERS / "pool.h").read_text()
    waiting = "const std::unique_lock<std::shared_mutex> nobody(calls_);"
    assert pool.count(waiting) == 1
    reports = race_reports(tmp_path, pool.replace(waiting, ""))
    assert any("data race" in report for report in islice(reports, 10))
