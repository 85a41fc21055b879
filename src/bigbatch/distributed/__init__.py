"""Several processes that train one model: when they talk, and what they say."""
