"""Use of trained models: loading, predicting, adapting to new clients, exporting."""
