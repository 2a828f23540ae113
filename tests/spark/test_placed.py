"""Several fits on samples that were placed once: the bits of fits that place for themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import DataFrame, SparkSession
from torch import nn

import sparkdl
from sparkdl.slab.root import SlabConfig, open_root, remove_root

pytestmark = pytest.mark.spark


def table(spark: SparkSession, rows: int, seed: int) -> DataFrame:
    generator = np.random.default_rng(seed)
    made = [(generator.normal(size=3).tolist(), int(generator.integers(2))) for _ in range(rows)]
    return spark.createDataFrame(made, "features array<double>, label int")


@pytest.fixture(scope="module")
def data(spark: SparkSession) -> DataFrame:
    return table(spark, 50, 0)


@pytest.fixture(scope="module")
def held_out(spark: SparkSession) -> DataFrame:
    return table(spark, 20, 1)


def trainer(**changes: Any) -> sparkdl.Trainer:
    values: dict[str, Any] = {
        "model": partial(nn.Linear, 3, 2),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": partial(torch.optim.Adam, lr=0.1),
        "batch_size": 16,
        "replicas": 2,
        "stop": sparkdl.max_epoch(2),
        **changes,
    }
    return sparkdl.Trainer(**values)


def result(trained: sparkdl.TrainedModel) -> tuple[Any, ...]:
    weights = {name: value.tolist() for name, value in trained.module.state_dict().items()}
    scores = [each["metrics"] for each in trained.history.validations]
    return trained.history.losses, weights, scores


@pytest.mark.slow
def test_fits_on_samples_placed_once_equal_fits_of_the_data(
    data: DataFrame,
    held_out: DataFrame,
    num_jobs: Callable[[], int],
    nothing_left: Callable[[], None],
    slabs: Callable[..., list[str]],
) -> None:
    first = trainer(validation=sparkdl.Validation(held_out))
    hidden = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    trainers = [
        first,
        replace(
            first,
            model=hidden,
            batch_size=7,
            seed=3,
            slices=1,
            replicas=None,
            validation=sparkdl.Validation(held_out, ["accuracy"]),
        ),
        replace(first, engine="gang", validation=None),
    ]
    before = num_jobs()
    alone = [result(each.fit(data)) for each in trainers]
    nothing_left()
    middle = num_jobs()
    with sparkdl.PlacedSamples.of(first, data) as samples:
        assert samples.replicas == 2
        assert repr(samples).startswith("<sparkdl.PlacedSamples: the columns ")
        assert [result(each.fit(samples)) for each in trainers] == alone
        assert len(slabs()) == 1  # a fit takes its own slabs with it
        with ThreadPool(2) as pool:
            fits = [partial(each.fit, samples) for each in trainers[:2]]
            found = pool.map(lambda fit: result(fit()), fits, chunksize=1)
        assert found == alone[:2]
    assert num_jobs() - middle < 2 * (middle - before)
    nothing_left()


def test_the_local_engine(data: DataFrame, nothing_left: Callable[[], None]) -> None:
    first = trainer(engine="local")
    second = replace(first, optimizer=partial(torch.optim.SGD, lr=0.5))
    with sparkdl.PlacedSamples.of(first, data) as samples:
        assert result(first.fit(samples)) == result(first.fit(data))
        assert result(second.fit(samples)) == result(second.fit(data))
    samples.close()  # once more does nothing


def test_a_failed_fit_leaves_the_samples(data: DataFrame, nothing_left: Callable[[], None]) -> None:
    with sparkdl.PlacedSamples.of(trainer(), data) as samples:
        with pytest.raises(sparkdl.ModelError, match="the model fails"):
            trainer(model=partial(nn.Linear, 4, 2)).fit(samples)
        assert trainer().fit(samples).history.losses


def test_a_trainer_that_reads_the_data_otherwise(data: DataFrame, held_out: DataFrame) -> None:
    def message(samples: Any, **changes: Any) -> str:
        with pytest.raises(sparkdl.ParameterError) as error:
            trainer(**changes).fit(samples)
        return str(error.value)

    with sparkdl.PlacedSamples.of(trainer(engine="local"), data) as samples:
        told = message(
            samples,
            features=["features"],
            label=["label", "other"],
            weight="w",
            columns={"features": sparkdl.Sequence()},
            replicas=3,
            model=partial(nn.Linear, 3, 2, dtype=torch.float64),
            validation=sparkdl.Validation(held_out),
        )
        assert told == (
            "the samples were placed for a trainer that reads the data otherwise: label=['label', "
            "'other'], placed with 'label'; weight='w', placed with None; columns={'features': "
            "Sequence(items=None, max_length=None, padding=0, lengths=False, mask=False, "
            "pad_to_max=False, padding_side='right')}, "
            'placed with {}; replicas=3, placed with 2; engine="shuffle", placed with "local"; a model '
            "of float64, placed with float32; validation was not placed. Make the trainers "
            "alike in this, or place the samples for this one: sparkdl.PlacedSamples.of(trainer, data)."
        )
    assert message(samples, engine="local") == (
        "these samples were given back with close(): place them again with "
        "sparkdl.PlacedSamples.of(trainer, data)."
    )


def test_a_run_has_the_token_of_its_samples(tmp_path: Any) -> None:
    samples = SlabConfig.new(str(tmp_path), "app")
    run = SlabConfig.new(str(tmp_path), "app", samples.name)
    assert open_root(run) is None
    own = open_root(run, create=True)
    theirs = open_root(samples)
    assert own is not None
    assert theirs is not None
    assert own.node_id == theirs.node_id
    assert own.directories != theirs.directories
    remove_root(samples)
    assert open_root(run) == own
    again = open_root(samples, create=True)
    assert again is not None
    assert again.node_id != own.node_id
    reopened = open_root(run)
    assert reopened is not None
    assert reopened.node_id == again.node_id
    remove_root(run)
    assert open_root(samples) == again


@pytest.mark.parametrize(("each", "told"), [((90, 70, 100), False), ((290, 5, 5), True)])
def test_a_replica_with_most_of_the_rows_is_told(
    spark: SparkSession, caplog: pytest.LogCaptureFixture, each: tuple[int, ...], told: bool
) -> None:
    """Data that has as many partitions as replicas keeps them, however uneven they are."""
    counts = spark.sparkContext.parallelize(each, 3)
    rows = counts.flatMap(lambda count: [([1.0, 2.0, float(i)], 1) for i in range(count)])
    trainer(replicas=3, engine="local", stop=sparkdl.max_iteration(1)).fit(rows)
    found = [message for message in caplog.messages if "times the mean share" in message]
    assert len(found) == told
    assert not found or found[0].startswith("replica 0 has 290 of the 300 rows, 2.9 times")
