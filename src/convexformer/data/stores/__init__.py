"""Token stores: tokens on disk in shards, larger than memory, and the writer and reader of them."""

from convexformer.data.stores.index import Backbone, StoreError
from convexformer.data.stores.store import TokenStore, open_store
from convexformer.data.stores.stream import Tokens, TokenStream, read_tokens
from convexformer.data.stores.writer import StoreWriter

__all__ = ["Backbone", "StoreError", "StoreWriter", "TokenStore", "TokenStream", "Tokens", "open_store", "read_tokens"]
