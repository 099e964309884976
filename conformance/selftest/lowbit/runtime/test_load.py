"""`lowbit.runtime.load`: any source on any backend, its account, what it closes and what it refuses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda_models import PROMPT
from cuda_models import model as random_model
from tiny_checkpoint import write as write_checkpoint
from tiny_gguf import CONFIG, write

from lowbit.backend import Backend, Capabilities
from lowbit.backend import load as load_backend
from lowbit.backend.whole_model import DeviceSettings
from lowbit.errors import ArgumentError, NotDeclaredError
from lowbit.formats.checkpoint.cache import QuantizedCheckpoint
from lowbit.model.block import FORMULAS
from lowbit.model.caches import CACHES, KEYS, Keys
from lowbit.model.decoder import Decoder, next_logits
from lowbit.model.generation import generate
from lowbit.model.perplexity import perplexity
from lowbit.model.quantization_plan import Plan, planned
from lowbit.runtime import BackendLinears, Options, StoredModel, load, open_model
from lowbit.system.storage import CACHE_VARIABLE
from lowbit_gpusim.backend import NumpyOnSim
from lowbit_numpy import NumpyBackend

SIMULATED = "lowbit_gpusim.backend:NumpyOnSim"
MODEL = random_model()


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("load") / "tiny.gguf")


def test_every_source_gives_the_same_model(gguf: Path) -> None:
    """A path, its text, an open model and weights in memory: the same bits as the decoder of the specification."""
    stored = open_model(gguf)
    ids = stored.tokenizer.encode("hello")
    decoder = Decoder(stored.weights, BackendLinears(load_backend("numpy")))
    for source in (gguf, str(gguf), stored, stored.weights):
        with load(source, "numpy") as model:
            assert model.config == stored.config
            np.testing.assert_array_equal(model.logits(ids), next_logits(decoder, ids))
            same = zip(model.generate(ids, 5), generate(decoder, ids, 5), strict=True)
            assert all(np.array_equal(ours.logits, theirs.logits) for ours, theirs in same)
            assert model.perplexity(ids * 3, 6).nll == perplexity(decoder, ids * 3, 6).nll


def test_the_progress_speaks_of_reading_only_where_something_is_read(gguf: Path, tmp_path: Path) -> None:
    """Weights in memory are only prepared; a file, open or not, and a directory are read first."""
    directory = write_checkpoint(tmp_path / "tiny")
    stored, said = open_model(gguf), dict[str, int]()

    def note(what: str, done: int, total: int) -> None:
        said[what] = done

    of_file, of_folder = (gguf, gguf.name), (directory, directory.name)
    for source, name in ((stored, gguf.name), (stored, ""), (open_model(gguf).weights, ""), of_file, of_folder):
        said.clear()
        load(source, "numpy", report=note).close()
        assert list(said) == [*([f"reading {name}"] if name else []), "preparing numpy"]


def test_text_needs_a_tokenizer(gguf: Path) -> None:
    """Where there is one, text and its tokens are the same prompt; weights in memory take tokens only."""
    stored = open_model(gguf)
    with load(stored, "numpy") as model:
        ids = stored.tokenizer.encode("hello")
        np.testing.assert_array_equal(model.logits("hello"), model.logits(ids))
        assert model.complete("hello", 4) == stored.tokenizer.decode(
            (step.token for step in model.generate(ids, 4)), special=False
        )
    with load(stored.weights, "numpy") as model, pytest.raises(ArgumentError, match="give tokens in place of text"):
        model.complete("hello")


def test_a_model_ends_where_its_tokenizer_says(gguf: Path, tmp_path: Path) -> None:
    """Unless other tokens are to stop it."""
    with load(gguf, "numpy") as model:
        free = [step.token for step in model.generate("hello", 5)]
    path = write(tmp_path / "stops.gguf", metadata={"tokenizer.ggml.eos_token_id": free[1]})
    with load(path, "numpy") as model:
        assert [step.token for step in model.generate("hello", 5)] == free[: free.index(free[1]) + 1]
        assert [step.token for step in model.generate("hello", 5, stop=())] == free


def test_what_is_opened_is_closed(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that was named is closed with its model, once; one that was given stays open."""
    closed: list[Backend] = []
    monkeypatch.setattr(NumpyBackend, "close", lambda self: closed.append(self))
    own = NumpyBackend()
    with load(gguf, own):
        pass
    assert closed == []
    model = load(gguf, "numpy")
    assert closed == []
    model.close()
    model.close()
    assert len(closed) == 1
    with pytest.raises(ArgumentError):
        load(gguf.parent / "absent.gguf", "numpy")
    assert len(closed) == 2


def test_the_account_of_layers_one_at_a_time(gguf: Path) -> None:
    """What the backend took and what numpy computes, in fields and in a sentence."""
    plan = Plan.uniform(2, 32)
    with load(gguf, "numpy", Options(plan, "integer")) as model:
        account = model.account()
    assert (account.fields["model"], account.fields["backend"]) == ("tiny.gguf", "numpy")
    assert account.fields["contract"] == "integer" and account.fields["steps_on_backend"] == []
    assert account.fields["matrices"] == {"by_backend": 7 * CONFIG.layers + 1, "by_numpy_float32": {}}
    assert account.sentence.startswith("tiny.gguf quantised to 2 bits, groups of 32, ")
    assert "matrices on numpy, integer contract" in account.sentence


def test_a_backend_that_runs_whole_models() -> None:
    """The same call; the account is the device's, and closing gives its memory back."""
    with load_backend(SIMULATED) as backend:
        expected = list(load(MODEL, "reference").generate(PROMPT, 3))
        with load(MODEL, backend, Options(device=DeviceSettings(context=20, keys="float32"))) as model:
            found = list(model.generate(PROMPT, 3, forced=[step.token for step in expected]))
            account = model.account()
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=1e-4)
    assert account.fields["settings"]["keys"] == "float32"
    assert account.fields["device"]["peak"] > 0 and "peak device memory" in account.sentence
    with load(MODEL, SIMULATED) as model:  # with the defaults of the device
        assert model.account().fields["settings"] == vars(DeviceSettings())


def test_one_layer_at_a_time_on_a_backend_that_runs_whole_models() -> None:
    """If it is asked for: the account is that of layers, and every matrix goes through the backend's products."""
    with load(MODEL, SIMULATED, Options(by_layer=True)) as model:
        fields, next_token = model.account().fields, int(np.argmax(model.logits(PROMPT)))
    assert "device" not in fields and fields["matrices"]["by_backend"] > 0
    with load(MODEL, "reference") as model:
        assert next_token == int(np.argmax(model.logits(PROMPT)))
        assert fields["matrices"] == model.account().fields["matrices"]


def test_whole_models_get_their_weights_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory is not read into memory for them, as it is stored or quantised."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    stored, plan, given = open_model(write_checkpoint(tmp_path / "tiny")), Plan.uniform(4, 32), list[object]()

    def decoder(self: NumpyOnSim, weights: object, *rest: object) -> None:
        given.append(weights)
        raise ZeroDivisionError

    monkeypatch.setattr(NumpyOnSim, "decoder", decoder)
    for options in (Options(), Options(plan)):
        with pytest.raises(ZeroDivisionError):
            load(stored, SIMULATED, options)
    assert given[0] is stored.layered
    assert isinstance(given[1], QuantizedCheckpoint) and given[1].plan == plan


def test_options_that_do_not_apply(gguf: Path) -> None:
    """Each is refused by its name, before anything is read or quantised."""
    absent = gguf.parent / "absent.gguf"
    others = {
        "contract": Options(contract="integer"),
        "step": Options(step="operations"),
        "keys": Options(keys="bfp12"),
    }
    for argument, options in others.items():
        with pytest.raises(ArgumentError, match=f"^{argument} does not apply to a backend that runs whole models") as e:
            load(absent, SIMULATED, options)
        assert e.value.argument == argument
    with pytest.raises(ArgumentError, match=r"^device applies only where a backend runs whole models; numpy"):
        load(absent, "numpy", Options(device=DeviceSettings()))
    with pytest.raises(ArgumentError, match="contract is 'int8'; allowed: float32 or integer"):
        load(absent, "numpy", Options(contract="int8"))  # type: ignore[arg-type]  # wrong on purpose


def test_what_a_backend_does_not_declare_is_said_before_anything_is_quantised(gguf: Path) -> None:
    """The integer contract is never replaced by another in silence."""

    class Without(NumpyBackend):
        name = "without"

        def capabilities(self) -> Capabilities:
            declared = super().capabilities().operations
            return Capabilities({name: what for name, what in declared.items() if "bfp" not in name})

    reports: list[tuple[str, int, int]] = []
    stored, options = open_model(gguf), Options(Plan.uniform(2, 32), "integer")
    with pytest.raises(NotDeclaredError, match=r"linear\.qgemm_bfp"):
        load(stored, Without(), options, lambda *report: reports.append(report))
    assert reports == []


def test_steps_on_the_backend(gguf: Path) -> None:
    """The account names the operations that the backend computes, and the logits differ by rounding only."""
    with load(gguf, "numpy", Options(step="operations")) as model, load(gguf, "numpy") as plain:
        account = model.account()
        names = account.fields["steps_on_backend"]
        assert "blocks.rms_norm" in names and f"also on numpy: {', '.join(names)}" in account.sentence
        np.testing.assert_allclose(model.logits("hello"), plain.logits("hello"), rtol=0, atol=1e-3)


def test_several_prompts_at_once(gguf: Path) -> None:
    """Texts and tokens; a model on a device reads one sequence at a time and says so."""
    with load(gguf, "numpy") as model:
        ids = model.tokens_of("hello")
        assert (
            model.generate_batch(["hello", ids], 3, stop=()) == [[s.token for s in model.generate(ids, 3, stop=())]] * 2
        )
    with load(gguf, SIMULATED) as device, pytest.raises(ArgumentError, match="several sequences at once"):
        device.generate_batch(["hello"], 1)


@pytest.mark.parametrize("keys", KEYS)
def test_keys_in_fewer_bits(keys: Keys, gguf: Path) -> None:
    """By formulas and by operations: the numbers are those of the cache, and the account names them."""
    texts = "hello", "hello, world; hello"
    with load(gguf, "numpy", Options(keys=keys)) as model, load(gguf, "numpy", Options(step="formulas")) as plain:
        linears = BackendLinears(load_backend("numpy"))
        expected = Decoder(open_model(gguf).weights, linears, ops=replace(FORMULAS, cache=CACHES[keys]))
        for text in texts:
            np.testing.assert_array_equal(model.logits(text), next_logits(expected, model.tokens_of(text)))
            assert keys == "float32" or not np.array_equal(model.logits(text), plain.logits(text))
        assert model.account().fields["keys"] == keys and f"keys in {keys}" in model.account().sentence
        assert plain.account().fields["keys"] is None
    with (
        load(gguf, "numpy", Options(step="operations", keys=keys)) as model,
        load(gguf, "numpy", Options(keys=keys)) as exact,
    ):
        for text in texts:
            np.testing.assert_allclose(model.logits(text), exact.logits(text), rtol=0, atol=1e-3)
    with pytest.raises(ArgumentError, match=r"^keys is 'int4'; allowed: float16, bfp12 or float32"):
        load(gguf, "numpy", Options(keys="int4"))  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.toolchain
@pytest.mark.parametrize("keys", KEYS)
def test_a_compiled_step_with_keys_in_fewer_bits(keys: Keys, gguf: Path) -> None:
    """It has the bits of the operations; float32 is the default."""
    with (
        load(gguf, "cppyy", Options(keys=keys)) as model,
        load(gguf, "cppyy", Options(step="operations", keys=keys)) as operations,
        load(gguf, "cppyy") as plain,
    ):
        assert model.account().fields["step"] == "compiled" and model.account().fields["keys"] == keys
        found = model.logits("hello")
        np.testing.assert_array_equal(found, operations.logits("hello"))
        assert np.array_equal(found, plain.logits("hello")) == (keys == "float32")


@pytest.mark.toolchain
def test_the_step_is_compiled_where_the_backend_can(gguf: Path) -> None:
    """By default; the account says so, and the logits have the bits of the operations. Other backends refuse."""
    with load(gguf, "cppyy") as model, load(gguf, "cppyy", Options(step="operations")) as plain:
        assert model.account().fields["step"] == "compiled" and "step compiled" in model.account().sentence
        assert plain.account().fields["step"] == "operations"
        np.testing.assert_array_equal(model.logits("hello"), plain.logits("hello"))
    with load(gguf, "numpy") as formulas:
        assert formulas.account().fields["step"] == "formulas"
    with pytest.raises(NotDeclaredError, match="compiled steps"):
        load(gguf, "numpy", Options(step="compiled"))
    with pytest.raises(ArgumentError, match=r"^step is 'fast'; allowed: auto, compiled, operations or formulas"):
        load(gguf, "numpy", Options(step="fast"))  # type: ignore[arg-type]  # wrong on purpose


def test_some_steps_on_the_backend(gguf: Path) -> None:
    """The backend computes those that are named and no other; one that is no elementwise operation is refused."""
    with load(gguf, "numpy", Options(step=("attention.attend",))) as model, load(gguf, "numpy") as plain:
        assert model.account().fields["steps_on_backend"] == ["attention.attend"]
        np.testing.assert_allclose(model.logits("hello"), plain.logits("hello"), rtol=0, atol=1e-3)
    with pytest.raises(ArgumentError, match=r"^step is 'linear\.qgemv'; allowed: attention\.attend, "):
        load(gguf, "numpy", Options(step=("linear.qgemv",)))
    with pytest.raises(ArgumentError, match=r"^step does not apply to a backend that runs whole models"):
        load(gguf, SIMULATED, Options(step=("attention.attend",)))


def test_progress_is_reported_by_stages(gguf: Path) -> None:
    """Reading, quantising and preparing, each from its beginning to its end."""
    reports: list[tuple[str, int, int]] = []
    load(gguf, "numpy", Options(Plan.uniform(4, 32)), lambda *report: reports.append(report)).close()
    stages = list(dict.fromkeys(what for what, _, _ in reports))
    assert stages == ["reading tiny.gguf", "quantising to 4 bits, groups of 32", "preparing numpy"]
    for stage in stages[1:]:
        done = [(part, total) for what, part, total in reports if what == stage]
        assert done[0] == (0, 1) and done[-1][0] == done[-1][1]


def test_a_plan_applied_before_or_by_load(gguf: Path) -> None:
    """Quantised in memory first, or by `Options.plan`: the same logits."""
    stored, plan = open_model(gguf), Plan.uniform(3, 32)
    quantised = StoredModel(stored.name, planned(stored.weights, plan), stored.tokenizer)
    with load(quantised, "numpy") as first, load(stored, "numpy", Options(plan)) as second:
        np.testing.assert_array_equal(first.logits("hello"), second.logits("hello"))
