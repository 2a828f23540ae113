"""Jobs that train, search, evaluate and predict as a YAML file says: the command ``sparkdl``."""
