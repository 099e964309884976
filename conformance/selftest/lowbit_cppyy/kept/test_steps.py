"""Kept steps: the bits of the operations, from files that are believed only if they are as they were written."""

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
from step_runs import EDGES, PROMPTS, edge, edge_answers, logits, model, operations
from tiny_gguf import CONFIG, published, write

from lowbit.arrays import U8
from lowbit.backend.base import Backend, StepRequest
from lowbit.errors import NotDeclaredError, UnavailableError
from lowbit.formats import digests
from lowbit.formats.checkpoint.reader import Checkpoint, open_checkpoint
from lowbit.model.decoder import AnyDecoder, Decoder
from lowbit.model.quantization_plan import Plan, Quantization
from lowbit.model.step import step_of
from lowbit.runtime import Options, load, placement
from lowbit.runtime.linears import Contract
from lowbit.system.storage import cache_folder, code_folder
from lowbit_cppyy import CppyyBackend
from lowbit_cppyy.kept import image, libraries, steps
from lowbit_cppyy.step.decoder import CompiledDecoder

pytestmark = [
    pytest.mark.toolchain,
    pytest.mark.skipif(libraries.compiler() is None, reason="there is no C++ compiler"),
]
FACTS = {"answer": 42}


def of_floats(seed: int, kind: str = "BF16") -> tiny_checkpoint.Published:
    """A checkpoint whose tensors are of one type."""
    made = tiny_checkpoint.published(tiny_checkpoint.DENSE, seed)
    for name, weights in made.tensors.items():
        made.types[name] = kind
        narrow = tiny_checkpoint.narrowed(weights, kind)
        made.tensors[name] = tiny_checkpoint.widened(narrow, kind).reshape(weights.shape)
    return made


def request_of(name: str, contract: Contract = "float32", made: list[str] | None = None) -> StepRequest:
    """The step of a small model; `made` gets an entry each time it is made."""
    weights = edge(name) if name in EDGES else model(name)

    def make(engine: Backend) -> tuple[Decoder, Mapping[str, Any]]:
        assert isinstance(engine, CppyyBackend)
        if made is not None:
            made.append(name)
        return operations(engine, weights, contract), FACTS

    return StepRequest((name, contract), weights.config, lambda: step_of(weights), make)


def kept(backend: CppyyBackend, request: StepRequest) -> AnyDecoder:
    found = backend.kept_step(request)
    assert found is not None
    decoder, facts = found
    assert facts == FACTS
    return decoder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, in which libraries of the usual one are found."""
    usual = code_folder(steps.FOLDER)
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    own = code_folder(steps.FOLDER)
    for each in usual.glob("*.so*"):
        shutil.copy2(each, own / each.name)
    yield own
    for each in own.glob("*.so*"):
        if not (usual / each.name).exists():
            shutil.copy2(each, usual / each.name)


@pytest.mark.whole
@pytest.mark.parametrize("name", ("shaped", "biased", "factors"))
def test_shaped_scores_and_biases_are_kept(name: str, folder: Path) -> None:
    """A factor and a cap of the logits, sinks, and biases of experts come back with the step, and so do its answers."""
    with CppyyBackend(threads=2) as backend:
        expected = edge_answers(operations(backend, edge(name)))
        for _ in range(2):
            found = kept(backend, request_of(name))
            assert isinstance(found, CompiledDecoder)
            for one, other in zip(edge_answers(found), expected, strict=True):
                np.testing.assert_array_equal(one, other)


CASES: tuple[tuple[str, Contract], ...] = (
    ("llama", "float32"),
    ("llama", "integer"),
    ("gemma3", "float32"),
    ("mixed", "integer"),
    ("sparse", "float32"),
)


@pytest.mark.parametrize("each", CASES, ids="-".join)
def test_a_kept_step_has_the_bits_of_the_operations(each: tuple[str, Contract], folder: Path) -> None:
    """When it is made, and when it is found; on one thread and on three; of prompts, tokens, batches and many rows."""
    name, contract = each
    made: list[str] = []
    for threads in (1, 3):
        with CppyyBackend(threads=threads) as backend:
            plain, own = operations(backend, model(name), contract), kept(backend, request_of(name, contract, made))
            assert isinstance(own, CompiledDecoder)
            for prompt in PROMPTS:
                np.testing.assert_array_equal(logits(own, prompt, 4), logits(plain, prompt, 4))
            read = plain.hidden([3, 1, 4, 1, 5], plain.new_state())
            np.testing.assert_array_equal(own.logits(read), plain.logits(read))
            states, theirs = [own.new_state(), own.new_state()], [plain.new_state(), plain.new_state()]
            np.testing.assert_array_equal(own.hidden_batch([7, 8], states), plain.hidden_batch([7, 8], theirs))
    assert made == [name]


def spoil(path: Path, at: int) -> None:
    """Put a file in its place in which one byte is another; a library may be mapped, so its own file stays as it is."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    other = path.with_name("spoilt")
    other.write_bytes(content)
    other.replace(path)


def test_what_is_not_as_it_was_written_is_made_again(folder: Path) -> None:
    """A byte of the header, of the arrays and of a library; a file cut off, and one that others can write."""
    made: list[str] = []

    def again() -> None:
        with CppyyBackend(threads=2) as backend:
            decoder = kept(backend, request_of("llama", made=made))
            np.testing.assert_array_equal(logits(decoder, 3, 2), expected)

    with CppyyBackend(threads=2) as backend:
        expected = logits(kept(backend, request_of("llama", made=made)), 3, 2)
    (path,) = folder.glob(f"*{steps.SUFFIX}")
    _, length, rest = path.read_bytes().split(b"\n", 2)
    library = folder / json.loads(rest[: int(length)])["libraries"][1][0]
    again()
    assert len(made) == 1
    for number, damage in enumerate(
        (
            lambda: spoil(path, 200),
            lambda: spoil(path, -1),
            lambda: os.truncate(path, path.stat().st_size - 64),
            lambda: path.write_bytes(b""),
            lambda: path.chmod(0o666),
            lambda: spoil(library, 5000),
            library.unlink,
        )
    ):
        damage()
        again()
        assert len(made) == number + 2
    assert not list(folder.glob(".*"))


def test_the_arrays_of_a_step_are_checked_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the file is the same; a changed byte of them is found although it was right before."""
    made: list[str] = []
    checked: list[int] = []
    digest = image._digest

    def counted(part: U8) -> str:
        checked.append(part.nbytes)
        return digest(part)

    later = SimpleNamespace(time_ns=lambda: time.time_ns() + 60 * 10**9)
    for module in (digests, image):
        monkeypatch.setattr(module, "time", later)  # as if the file had been there for long
    with CppyyBackend(threads=1) as backend:
        expected = logits(kept(backend, request_of("llama", made=made)), 3, 2)
        (path,) = folder.glob(f"*{steps.SUFFIX}")
        monkeypatch.setattr(image, "_digest", counted)
        for once in (True, False, False):
            checked.clear()
            found = kept(backend, request_of("llama", made=made))
            np.testing.assert_array_equal(logits(found, 3, 2), expected)
            assert bool(checked) == once
        spoil(path, -1)
        found = kept(backend, request_of("llama", made=made))
        np.testing.assert_array_equal(logits(found, 3, 2), expected)
    assert made == ["llama", "llama"]


@pytest.mark.whole
def test_a_step_of_another_model_is_not_taken(folder: Path) -> None:
    """The file says whose configuration it is of, whatever its name."""
    with CppyyBackend(threads=1) as backend:
        kept(backend, request_of("llama"))
        (path,) = folder.glob(f"*{steps.SUFFIX}")
        kept(backend, request_of("gemma3"))
        other = next(each for each in folder.glob(f"*{steps.SUFFIX}") if each != path)
        shutil.copy(other, path)
        made: list[str] = []
        decoder = kept(backend, request_of("llama", made=made))
        np.testing.assert_array_equal(logits(decoder, 3, 2), logits(operations(backend, model("llama")), 3, 2))
    assert made == ["llama"]


def test_only_some_steps_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used last."""
    monkeypatch.setattr(steps, "MOST", 2)
    with CppyyBackend(threads=1) as backend:
        paths = []
        for name in ("llama", "gemma3"):
            kept(backend, request_of(name))
            paths += [each for each in folder.glob(f"*{steps.SUFFIX}") if each not in paths]
        kept(backend, request_of("llama"))
        kept(backend, request_of("llama", "integer"))
    assert paths[0].exists() and not paths[1].exists()
    assert not list(folder.glob(f"{paths[1].name}*"))


def test_libraries_that_were_not_used_for_long_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the files of their digests; a step that needs one is made again."""
    monkeypatch.setattr(steps, "MOST_LIBRARIES", 2)
    made: list[str] = []
    with CppyyBackend(threads=1) as backend:
        for name in ("llama", "gemma3", "llama"):
            kept(backend, request_of(name, made=made))
            assert len(list(folder.glob("*.so"))) == len(list(folder.glob("*.so.sha256"))) == 2
    assert made == ["llama", "gemma3", "llama"]


def test_the_libraries_of_a_new_step_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be older than others, as when another step shares them."""
    monkeypatch.setattr(steps, "MOST_LIBRARIES", 2)
    with CppyyBackend(threads=1) as backend:
        kept(backend, request_of("llama"))
        for library in folder.glob("*.so"):
            os.utime(library, (1e9, 1e9))
            library.with_name(f"newer-{library.name}").touch()
        for step in folder.glob(f"*{steps.SUFFIX}"):
            step.unlink()
        kept(backend, request_of("llama"))
    assert not [each for each in folder.glob("*.so") if each.name.startswith("newer")]


def test_a_step_is_found_where_nothing_can_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image of a container: that it was used now is noted nowhere."""
    made: list[str] = []
    with CppyyBackend(threads=1) as backend:
        kept(backend, request_of("llama", made=made))

        def refused(path: Path, *arguments: Any, **options: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        monkeypatch.setattr(Path, "touch", refused)
        kept(backend, request_of("llama", made=made))
    assert made == ["llama"]


def test_a_processor_of_another_kind_has_steps_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels fetch their words in another way, even if both have the same instructions."""
    made: list[str] = []
    with CppyyBackend(threads=1) as backend:
        for kind in ("intel", "zen4", "intel"):
            monkeypatch.setattr(steps, "kind", partial(str, kind))
            kept(backend, request_of("llama", made=made))
    assert made == ["llama", "llama"]


def test_a_link_to_nothing_is_passed_over(folder: Path) -> None:
    """Editors leave them beside a file that is being edited."""
    place = cache_folder() / "tuned" / "processor"
    place.mkdir(parents=True)
    (place / ".#outcome.json").symlink_to("nobody@nowhere")
    with CppyyBackend(threads=1) as backend:
        kept(backend, request_of("llama"))


def test_contexts_have_steps_of_their_own(folder: Path, tmp_path: Path) -> None:
    """So loading a model with one and with another finds both."""
    file = write(tmp_path / "m.gguf", published(3))
    for context in (None, 32):
        with load(file, "cppyy", context=context) as model:
            assert model.config.context == (context or CONFIG.context)
    before = {path: path.stat().st_ino for path in folder.glob(f"*{steps.SUFFIX}")}
    for context in (None, 32):
        with load(file, "cppyy", context=context) as model:
            assert model.config.context == (context or CONFIG.context)
    assert before == {path: path.stat().st_ino for path in folder.glob(f"*{steps.SUFFIX}")} and len(before) == 2


def test_a_closed_backend_says_so(folder: Path) -> None:
    """Its threads have ended."""
    with CppyyBackend(threads=2) as backend:
        decoder = kept(backend, request_of("llama"))
    with pytest.raises(UnavailableError, match="closed"):
        decoder.hidden([1], decoder.new_state())


def test_a_forked_child_is_told(folder: Path) -> None:
    """It has none of the threads."""
    with CppyyBackend(threads=2) as backend:
        decoder = kept(backend, request_of("llama"))
        child = os.fork()
        if child == 0:
            try:
                decoder.hidden([1], decoder.new_state())
            except UnavailableError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(3)
        assert os.waitpid(child, 0)[1] == 0


def test_without_a_compiler_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where the compiler fails or the folder cannot be used, of which a warning tells, nor where the step has parts
    of another backend."""
    told = partial(pytest.warns, UserWarning)
    with CppyyBackend(threads=1) as backend, monkeypatch.context() as patch:
        patch.setattr(steps, "compiler", lambda: None)
        assert backend.kept_step(request_of("llama")) is None
    with CppyyBackend(threads=1) as backend, monkeypatch.context() as patch:
        patch.setattr(libraries, "OPTIONS", (*libraries.OPTIONS, "--no-such-option"))
        with told(match="^the compiled step is not kept: compiling C\\+\\+ is unavailable: .*no-such-option"):
            assert backend.kept_step(request_of("llama")) is None
    with CppyyBackend(threads=1) as backend, monkeypatch.context() as patch:
        silent = folder / "c++"
        silent.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 1\nexec c++ "$@"\n')
        silent.chmod(0o700)
        patch.setattr(libraries, "compiler", lambda: str(silent))
        with told(match="^the compiled step is not kept: "):
            assert backend.kept_step(request_of("llama")) is None
    with CppyyBackend(threads=1) as backend:
        folder.chmod(0o777)
        with told(match="^the compiled step is not kept: .*: other users can write to "):
            assert backend.kept_step(request_of("llama")) is None
        folder.chmod(0o700)

        def refuse(engine: Backend) -> Any:
            raise NotDeclaredError(engine.name, "compiled steps of this kind")

        asked = request_of("llama")
        assert backend.kept_step(StepRequest(asked.identity, asked.config, asked.step, refuse)) is None
    assert not list(folder.glob(f"*{steps.SUFFIX}"))


def test_a_model_in_a_file_is_kept(folder: Path, tmp_path: Path) -> None:
    """`load` finds the step by the content of the file: a copy has the same one, a changed file another."""
    file = write(tmp_path / "m.gguf", published(3))
    answers = []
    for path in (file, Path(shutil.copy(file, tmp_path / "copy.gguf")), write(tmp_path / "n.gguf", published(4))):
        with load(path, "cppyy") as ready, load(path, "cppyy", Options(step="operations")) as plain:
            assert isinstance(ready.decoder, CompiledDecoder) and ready.account().fields["step"] == "compiled"
            answers.append(ready.logits([1, 2, 3]))
            np.testing.assert_array_equal(answers[-1], plain.logits([1, 2, 3]))
            facts = dict(ready.account().fields)
            assert facts["weight_bytes"] == plain.account().fields["weight_bytes"]
            assert facts["matrices"] == plain.account().fields["matrices"] and json.dumps(facts)
    np.testing.assert_array_equal(answers[0], answers[1])
    assert not np.array_equal(answers[0], answers[2])
    assert len(list(folder.glob(f"*{steps.SUFFIX}"))) == 2


@pytest.mark.parametrize("kind", ["BF16", "F32"])
def test_a_model_in_a_directory_is_kept(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load` finds the step by the digests of its tensors, and then reads none of them."""
    places = [tmp_path / name for name in ("m", "n")]
    for number, place in enumerate(places):
        tiny_checkpoint.write(place, of_floats(number, kind))
    with load(places[0], "cppyy") as first, load(places[1], "cppyy") as other:
        assert first.account().fields["matrices"]["by_numpy_float32"] == {}
        answer = first.logits([1, 2, 3])
        assert not np.array_equal(answer, other.logits([1, 2, 3]))
    with load(places[0], "numpy", Options(step="formulas")) as plain:
        np.testing.assert_allclose(answer, plain.logits([1, 2, 3]), rtol=0, atol=1e-5 * np.abs(answer).max())
    assert len(list(folder.glob(f"*{steps.SUFFIX}"))) == 2
    monkeypatch.setattr(Checkpoint, "layer", None)
    with load(shutil.copytree(places[0], tmp_path / "copy"), "cppyy") as again:
        np.testing.assert_array_equal(again.logits([1, 2, 3]), answer)


def test_a_large_directory_is_not_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of it would fill the disk."""
    path, before = tiny_checkpoint.write(tmp_path / "m", of_floats(0)), set(folder.iterdir())
    monkeypatch.setattr(placement, "MOST_KEPT", open_checkpoint(path).nbytes - 1)
    with load(path, "cppyy") as model:
        assert model.logits([1, 2, 3]).size
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_model_that_is_quantised_is_kept(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each plan has a step of its own; one that is found quantises nothing."""
    if kind == "file":
        path = write(tmp_path / "m.gguf", published(3))
    else:
        path = tiny_checkpoint.write(tmp_path / "m", tiny_checkpoint.published(tiny_checkpoint.DENSE))
    plans = [Options(Plan(each, each, head=each)) for each in (Quantization(4, 16), Quantization(3, 16))]
    answers = []
    for options in plans:
        with load(path, "cppyy", options) as model:
            answers.append(model.logits([1, 2, 3]))
    assert not np.array_equal(answers[0], answers[1]) and len(list(folder.glob(f"*{steps.SUFFIX}"))) == 2
    monkeypatch.setattr(Plan, "__call__", None)
    for options, answer in zip(plans, answers, strict=True):
        with load(path, "cppyy", options) as model:
            np.testing.assert_array_equal(model.logits([1, 2, 3]), answer)
