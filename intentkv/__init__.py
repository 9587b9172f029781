"""IntentKV core: what to keep in the KV cache of a multi-turn agent, independent of any serving engine."""

__version__ = "0.1.0"
