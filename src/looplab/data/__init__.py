"""Text for training and audits: documents, tokenizers, the built-in corpus, packed and resumable loading."""
