"""vLLM as one engine among others: its adapter, its load format, and everything that knows vLLM's insides.

``plugin`` runs in every vLLM process and costs nothing until a model is loaded; ``loader`` maps the daemon's weights
there; ``adapter`` is the daemon's side; ``rehearse`` is the throwaway engine. No other part of warmseed imports vLLM.
"""
