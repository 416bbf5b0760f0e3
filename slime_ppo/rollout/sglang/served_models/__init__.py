"""The model classes that a server imports at start: named to SGLang by its SGLANG_EXTERNAL_MODEL_PACKAGE.

Without it SGLang imports all of its 250 model files in each process, 3 CPU seconds and 60 MB. A class that is not among these
is still found: SGLang then imports them all.
"""
