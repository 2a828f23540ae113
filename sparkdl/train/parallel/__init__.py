"""How a model is divided among ranks, by data, layer, stage or shard; pure, on the driver."""
