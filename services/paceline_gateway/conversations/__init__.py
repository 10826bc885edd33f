"""Conversations and answers, whichever interface they come by."""
