"""Jobs for ``spark-submit`` that train, evaluate and predict, configured by a YAML file."""
