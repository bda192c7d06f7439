"""What was trained, in use: loading, predicting, adapting to a newcomer, exporting."""
