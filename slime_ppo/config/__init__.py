"""Configuration: frozen dataclasses of options, one parser built from them, and the arithmetic checks. No torch, no ray."""
