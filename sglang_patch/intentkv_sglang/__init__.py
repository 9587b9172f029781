"""The SGLang plugin: everything that knows SGLang's classes. The only room that imports sglang."""
