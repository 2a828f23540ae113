"""Jobs for ``spark-submit``: train, evaluate and predict as a YAML file says."""
