"""Name of the plain-CPU platform, importable without SGLang."""

NAME = "intentkv_cpu"
