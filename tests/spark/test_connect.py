"""Spark Connect, with a real server: models that were saved score there, and the gang trains."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import connected_fits
import numpy as np
import pytest
import score_connected as script
import small_text
import torch
import train_connected as cases
from launch import asked_for, digest, launch, soak_but
from torch import nn

import sparkdl
from sparkdl.data.fields import Field
from sparkdl.infer.forward import INLINE_BYTES
from sparkdl.infer.outputs import Output

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]
BALLAST_BYTES = {"small": 0, "large": 4 * INLINE_BYTES}
"""A large model travels apart from the query."""
TEXTS = ["a good film", "a very long day in town", "bad weather"]


def module(ballast: int) -> nn.Module:
    torch.manual_seed(ballast)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0))
    net.register_buffer("ballast", torch.zeros(ballast // 4))
    return net.eval()


@pytest.fixture(scope="module")
def rows() -> list[tuple[list[float], float]]:
    random = np.random.default_rng(7)
    return [(x.tolist(), float(x.sum())) for x in random.normal(size=(20, 3)).astype(np.float32)]


@pytest.fixture(scope="module")
def found(request: Any, rows: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("connect")
    models = {}
    for name, ballast in BALLAST_BYTES.items():
        net = module(ballast)
        trained = sparkdl.TrainedModel(
            module=net,
            model=net,
            loss=None,
            features=("x",),
            label=("y",),
            fields=(Field("x", "float32", (3,)), Field("y", "float32", ())),
            num_features=1,
            float_dtype="float32",
            output=Output.of(net(torch.zeros(1, 3))),
            history=sparkdl.History(),
        )
        models[name] = str(trained.save(folder / name))
    written = str(folder / "written")
    data = connected_fits.write_data(folder / "data.parquet")
    bert = str(folder / "bert")
    small_text.classifier().save_pretrained(bert)
    small_text.tokenizer().save_pretrained(bert)
    given = {
        "models": models,
        "texts": TEXTS,
        "bert": bert,
        "written": written,
        "data": data,
        "place": str(folder),
    }
    asked = {"mistakes": asked_for(request, "mistake"), "parts": asked_for(request, "part")}
    asked["kills"] = list(dict.fromkeys(["the checkpoint", *asked_for(request, "kill")]))
    names = list(dict.fromkeys(["perceptron", "mixed", *asked_for(request, "name")]))
    answers = launch(Path(script.__file__), folder, rows=rows, names=names, **asked, **given)
    return {**answers, "folder": folder}


def needs(part: str) -> Any:
    """Mark a test that looks at a part of the script's work, which runs if such a test does."""
    return pytest.mark.parametrize("part", [part])


@pytest.fixture
def done(found: Any, part: str) -> Any:
    """Return the results of the part that a test needs."""
    return found[part]


@pytest.fixture(scope="module")
def data(spark: SparkSession, found: Any) -> DataFrame:
    """The data of the training, in a classic session."""
    return spark.read.parquet(str(found["folder"] / "data.parquet"))


def test_it_is_a_session_of_spark_connect(found: Any) -> None:
    assert found["session"] == "pyspark.sql.connect.session"


@pytest.mark.parametrize("size", BALLAST_BYTES)
def test_a_saved_model_scores_as_in_torch(found: Any, rows: Any, size: str) -> None:
    features, labels = (torch.tensor(values) for values in zip(*rows, strict=True))
    with torch.no_grad():
        expected = module(BALLAST_BYTES[size])(features)
    answers = found[size]
    torch.testing.assert_close(torch.tensor(answers["predictions"]), expected)
    assert answers["again"] == 3
    assert answers["apart"] == {"small": "NoneType", "large": "Artifact"}[size]
    error = nn.functional.mse_loss(expected, labels).item()
    assert answers["evaluated"] == {"mse": pytest.approx(error, rel=1e-5)}


def test_any_model_scores_as_column_as_files_and_in_sql(found: Any) -> None:
    expected = pytest.approx(found["large"]["predictions"], rel=1e-5)
    assert [value for value, _ in found["any model"]] == expected
    assert {error for _, error in found["any model"]} == {None}
    assert found["written"] == expected
    assert found["function"] == expected


def test_a_large_model_is_sent_once(found: Any) -> None:
    """It was sent for the predictions before."""
    assert found["sends"] == 0


@pytest.mark.parametrize(
    "name",
    soak_but(
        ["perceptron", "mixed"],
        [
            *"perceptron mixed weighted sequence clipped sampled adapting".split(),
            *("perceptron, fsdp", "mixed, fsdp", "mixed, gossip"),
        ],
    ),
)
def test_a_fit_has_the_bits_of_a_classic_gang(found: Any, data: DataFrame, name: str) -> None:
    trained = connected_fits.fits(data)[name].fit(data)
    assert found["training"]["digests"][name] == cases.digests(trained)


def test_a_pass_over_a_part_of_the_data_has_the_bits_too(found: Any, data: DataFrame) -> None:
    trained = connected_fits.fits(data)["perceptron"].partial_fit(data.where("kind % 2 = 0"))
    assert found["training"]["pass"] == digest(trained.module)


@pytest.mark.parametrize(
    "mistake",
    soak_but(
        ["a row", "a callback"],
        [
            *("a row", "a stream", "a column", "no rows", "the model", "the validation"),
            *("a callback", "the mesh"),
        ],
    ),
)
def test_a_mistake_has_the_message_of_a_classic_session(
    found: Any, data: DataFrame, mistake: str
) -> None:
    message = cases.told(connected_fits.bad_fits(data)[mistake])
    row = re.compile(r"row \d+ of partition \d+")  # partitions are read otherwise
    assert row.sub("row", found["training"]["messages"][mistake]) == row.sub("row", message)


def test_callbacks_run_in_rank_0(found: Any) -> None:
    """What they keep comes back at the end."""
    training = found["training"]
    (expected,) = training["digests"]["perceptron"]
    assert training["noted"] == [True, "10", expected, 10]
    assert training["callback"].startswith("ParameterError: the callback Note cannot be pickled")


@pytest.mark.parametrize("kill", soak_but(["the checkpoint"], ["the checkpoint", "the beginning"]))
def test_a_lost_rank_costs_no_bits(found: Any, kill: str) -> None:
    """The gang is submitted again, from the checkpoint after the first of two epochs."""
    training = found["training"]
    assert training["killed"][kill] == [*training["digests"]["perceptron"], 10]
    assert any(f"Submitted again, from {kill}" in line for line in training["log"])


def test_its_checkpoint_continues_in_a_classic_session(found: Any, data: DataFrame) -> None:
    trainer = connected_fits.fits(data)["perceptron"]
    resumed = replace(trainer, engine="shuffle").fit(data, resume=found["folder"] / "checkpoints")
    assert cases.digests(resumed) == found["training"]["digests"]["perceptron"]


def test_the_default_engine_is_taken_as_the_gang(found: Any) -> None:
    training = found["training"]
    assert training["default engine"] == training["digests"]["perceptron"]
    told = 'training with engine="gang": the engine "shuffle" needs'
    assert training["log"][0].startswith(told)
    assert sum(line.startswith(told) for line in training["log"]) == 1


@pytest.mark.soak
@needs("replayed")
def test_a_history_is_repeated_if_a_gang_can(found: Any, done: Any) -> None:
    assert done["synchronous"] == found["training"]["digests"]["perceptron"]
    assert "which the ranks of a gang cannot" in done["dropped"]


def test_a_large_result_comes_through_the_folder_of_checkpoints(found: Any) -> None:
    """That of the fit whose rank was lost."""
    assert found["training"]["left"] == []
    assert "give Trainer(checkpoint=" in found["training"]["no path"]


def test_what_needs_rdds_says_so(found: Any) -> None:
    messages = found["training"]["classic only"]
    assert all(text.startswith("SessionError: ") for text in messages.values())
    assert 'use engine="gang"' in messages["local"]
    assert "leave it out" in messages["min_ranks"]
    assert 'trains with engine="gang" only' in messages["staleness"]
    assert "this process uses Spark Connect" in messages["session"]


@needs("interrupted")
def test_an_interrupt_ends_the_training_and_a_second_one_the_fit(found: Any, done: Any) -> None:
    interrupted = done
    assert found["training"]["slabs"] == []
    assert interrupted["1"]["told"] == ["interrupted", True]
    assert interrupted["2"]["told"] == ["KeyboardInterrupt"]
    for one in (interrupted["1"], interrupted["2"]):
        assert one["ranks"] == 2
        assert one["slabs"] == []
        assert one["seconds"] < 15  # 4 on a quiet machine, with the start of new ranks


@needs("interrupted")
def test_a_bar_follows_the_training(done: Any) -> None:
    shown = done["shown"]
    assert re.search(r"epoch \d+: .*loss .* samples/s", shown)
    assert shown.count("a line of a callback\n") == 2


@pytest.mark.soak
@needs("placed")
def test_several_fits_share_samples_that_were_persisted_once(
    found: Any, done: Any, data: DataFrame
) -> None:
    trainer = connected_fits.fits(data)["mixed"]
    placed = done
    assert placed["digests"][0] == found["training"]["digests"]["mixed"]
    assert placed["digests"][1] == cases.digests(replace(trainer, seed=1).fit(data))
    assert "replicas=1, placed with 2" in placed["differs"]
    assert "were given back with close()" in placed["closed"]


@pytest.mark.soak
@needs("logged")
def test_summaries_go_where_the_client_would_write_them(done: Any) -> None:
    logged = done
    assert logged["events"] > 0
    assert logged["same"]
    assert {"loss", "learning_rate"} <= set(logged["metrics"])
    assert logged["status"] == ["FINISHED", "FINISHED"]
    assert logged["experiment"] == "of the client"


REFUSED = {
    "module": 'ModelError: reading the data: the executors cannot import "only_here"',
    "session": "DataError: fit takes a DataFrame, not pyspark.sql.connect.session.SparkSession.",
    "column": "DataError: search takes a DataFrame, not pyspark.sql.connect.column.Column.",
    "stop": "ParameterError: stop= cannot be pickled",
    "frame": "ParameterError: stop= cannot be pickled",
    "profile": "SessionError: resource_profile needs a cluster",
    "exception": "SeveralArguments: 7 at the start",
    "function": "ParameterError: acquire, or an argument of it, cannot be pickled",
}


@needs("refused")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_had_is_told_before_the_training(done: Any, what: str) -> None:
    assert done[what].startswith(REFUSED[what])


def test_a_session_that_was_stopped_is_told(found: Any) -> None:
    meanwhile, *afterwards = found["stopped"]
    assert meanwhile.startswith("SessionError: the Spark Connect session ended: it was stopped")
    for text in afterwards:
        assert text.startswith("SessionError: the Spark Connect session was stopped")


@pytest.mark.soak
@needs("groups")
def test_groups_have_the_bits_of_a_classic_session(done: Any, data: DataFrame) -> None:
    models = sparkdl.fit_groups(data, "kind", connected_fits.by_group())
    groups = done
    assert groups["groups"] == connected_fits.of_groups(models)
    models.unpersist()
    assert groups["predicted"]
    assert groups["no group"] == "ParameterError: no model of 9: there is no such group."
    assert groups["a mistake"].startswith('DataError: by names "sort"')


@pytest.mark.soak
@needs("streamed")
def test_a_batch_of_a_stream_has_the_bits_of_a_classic_session(done: Any, data: DataFrame) -> None:
    """Also where the trainer validates."""
    assert done == digest(connected_fits.fits(data)["mixed"].partial_fit(data).module)


@pytest.mark.soak
@needs("search")
def test_a_search_has_the_values_of_a_classic_session(done: Any, data: DataFrame) -> None:
    classic = connected_fits.search(data)
    search = done
    assert search["trials"] == connected_fits.of_search(classic)
    assert search["best"] == digest(classic.best_model.module)
    assert search["reason"] == "SeveralArguments: 7 at the start"
    assert search["checkpoints"].startswith("SessionError: Trainer(checkpoint=) cannot be had")


@pytest.mark.soak
@needs("texts")
def test_texts_are_classified_and_embedded(done: Any) -> None:
    model, tokenizer = small_text.classifier(), small_text.tokenizer()
    scores, vectors = [], []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            scores.append(
                model(inputs.input_ids, inputs.attention_mask).logits.softmax(1).max().item()
            )
            hidden = model.bert(inputs.input_ids, inputs.attention_mask).last_hidden_state[0, 0]
        vectors.append((hidden / hidden.norm()).tolist())
    assert done["scores"] == pytest.approx(scores, rel=1e-4)
    torch.testing.assert_close(
        torch.tensor(done["vectors"]), torch.tensor(vectors), rtol=1e-4, atol=1e-4
    )


@needs("readme")
@pytest.mark.soak
def test_the_program_of_the_readme_runs_there(done: Any) -> None:
    assert re.match(r"\{'loss': 0\.\d+, 'accuracy': 0\.\d+\}\n", done)
    assert "prediction" in done


@needs("orphan")
@pytest.mark.soak
def test_another_client_continues_the_run_of_one_that_died(done: Any) -> None:
    """Spark ends that run: it holds its slots for as long as the server waits for its client."""
    check_orphan(done, slots=2)


def check_orphan(found: dict[str, Any], slots: int) -> None:
    assert found["ranks"] == slots
    assert found["last"] > 0
    assert found["iterations"] == found["last"] + 3


@needs("guide")
@pytest.mark.soak
def test_the_page_of_the_guide_runs_there(done: Any) -> None:
    assert done == ["accuracy", "loss"]


@needs("pipeline")
@pytest.mark.soak
def test_an_estimator_of_pyspark_ml_trains(done: Any) -> None:
    assert "probability" in done["columns"]
    for text in done["refused"]:
        assert text.startswith(
            "SessionError: stages of sparkdl.ml are saved and loaded by Hadoop's"
        )


@needs("gangs")
def test_functions_run_on_ranks(done: Any) -> None:
    gangs = done
    assert gangs["results"] == [[3.0, 0], [3.0, 1]]
    assert gangs["printed"] == ["[rank 0] of 2", "[rank 1] of 2"]
    assert gangs["slots"] == 2
    assert re.match(
        r"TrainingError: fails: rank 1 on \S+ failed. ValueError: no luck\n", gangs["fails"]
    )


@pytest.mark.soak
@needs("more gangs")
def test_functions_on_ranks_take_and_return_much_or_end_the_process(done: Any) -> None:
    gangs = done
    assert gangs["engines"] == ["gang", "local", "shuffle"]
    assert gangs["large"] == [3 << 20] * 2
    assert gangs["too large"].startswith(
        "TrainingError: bytes: the results of the ranks have 140 MB"
    )
    assert re.match(
        r"TrainingError: exit: rank \d on \S+ failed. SystemExit: sys.exit\(3\) ends",
        gangs["exits"],
    )


def test_too_few_slots_are_an_error_at_once(found: Any) -> None:
    assert found["training"]["slots"] == (
        "ParameterError: a gang of 9 ranks needs 9 task slots at once, and this session has 2: ask "
        "for at most 2 ranks, or for more executors or cores."
    )


@pytest.mark.soak
@needs("waits")
def test_what_a_gang_waits_for_in_vain_is_an_error_soon(done: Any) -> None:
    assert done["dies"].startswith("StateLostError: a rank of the gang went away: ")
    assert done["late"].startswith("StalledError: sleep: waited 1.5 s for rank 0")
    for text in done["silent"]:
        assert text.startswith("SessionError: Spark did not begin with the gang's 9 tasks")


@pytest.mark.soak
@needs("waits")
def test_a_gang_waits_for_another_one_of_the_client(done: Any) -> None:
    assert done["in turn"] == [[None, None], [None, None]]


@pytest.mark.soak
@needs("groups")
def test_ranks_on_two_executors(data: DataFrame, found: Any, done: Any, tmp_path: Path) -> None:
    names = ["mixed", "perceptron, fsdp"]
    path, place = str(found["folder"] / "data.parquet"), str(tmp_path)
    script_of_cluster = Path(script.__file__).with_name("connect_cluster.py")
    cluster = launch(script_of_cluster, tmp_path, data=path, names=names, place=place)
    assert cluster["executors"] == 2
    for name in names:
        trained = connected_fits.fits(data)[name].fit(data)
        assert cluster["digests"][name] == cases.digests(trained)
    assert cluster["interrupted"]["1"]["told"] == ["interrupted", True]
    assert cluster["interrupted"]["2"]["told"] == ["KeyboardInterrupt"]
    assert cluster["groups"] == done["groups"]
    check_orphan(
        cluster["orphan"], slots=4
    )  # its run ends by itself, long before the server would end it
    assert cluster["orphan"]["alone"] < 120
    profile = cluster["profile"]  # each rank has both cores of its executor
    assert profile["threads"] == [2, 2]
    assert profile["iterations"] == 10
    assert profile["slots"].startswith("ParameterError: a gang of 3 ranks needs 3 task slots")
