"""The fields of config.json that several families share, by the part of a decoder that they describe."""
