"""Run folders and client memory."""
