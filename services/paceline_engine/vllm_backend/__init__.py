"""vLLM executes, and this package decides: a model of vLLM's, behind the engine's interface."""
