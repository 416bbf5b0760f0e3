"""Unpatched SGLang servers as the rollout engine. Our own processes import no sglang: only `serve` does, in a server's."""
