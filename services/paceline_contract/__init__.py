"""What all servers mean by the same words: limits, prefixes, proposals, calls, sampling.

The lowest package: it imports no other. Orchestrators and model servers agree on what stands here,
and Max-Gram, which drafts from text alone, lies here because both of them draft with it.
"""
