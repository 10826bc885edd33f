"""Chat templates: a conversation becomes a prompt by the model's own template."""
