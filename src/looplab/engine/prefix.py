"""Pages that outlive their request, found again by the tokens before them. No torch.

    key of page i = blake2b(key of page i - 1, tokens of page i);   key of page -1 = root

The root stands for all that entries depend on besides tokens. A page is cached only below the cached page of its
prefix that the same table names, so a table that names a page names its ancestors, and an idle page has idle
descendants only: the least recently used leaf can always go. Tokens are compared on a hit: a key alone proves nothing.
"""

import hashlib
import heapq
import struct
from collections.abc import Sequence

from looplab.engine.pages import IntegrityError, PagePool


class Node:
    """A page of the cache and where it hangs."""

    __slots__ = ("children", "key", "page", "parent", "tokens", "used")

    def __init__(self, key: bytes, page: int, tokens: tuple[int, ...], parent: "Node | None", used: int):
        self.key, self.page, self.tokens, self.parent, self.used = key, page, tokens, parent, used
        self.children: set[Node] = set()


class PrefixCache:
    """Finds, keeps and gives up pages of a pool.

    Args:
        pool: Asks this cache for pages when it has no free ones.
        page_tokens: Tokens of a page.
    """

    def __init__(self, pool: PagePool, page_tokens: int):
        self.pool, self.page_tokens = pool, page_tokens
        self.nodes: dict[bytes, Node] = {}
        self.by_page: dict[int, Node] = {}
        self.evicted = 0
        self._clock = 0
        self._leaves: list[tuple[int, int, bytes]] = []
        """(last use, page, key) of leaves, some of them out of date."""
        pool.reclaim = self._evict

    def keys(self, root: bytes, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """The key of every full page of a text."""
        keys: list[bytes] = []
        size = self.page_tokens
        for start in range(0, len(tokens) - size + 1, size):
            page = struct.pack(f"<{size}q", *tokens[start : start + size])
            keys.append(hashlib.blake2b((keys[-1] if keys else root) + page, digest_size=16).digest())
        return tuple(keys)

    def match(self, keys: Sequence[bytes], tokens: Sequence[int]) -> list[int]:
        """Pages of the longest cached prefix of a text.

        Args:
            keys: Of its full pages.
            tokens: The text.
        """
        found = []
        for index, key in enumerate(keys):
            node = self.nodes.get(key)
            if node is None or node.tokens != self._page(tokens, index):
                break
            found.append(node.page)
        return found

    def touch(self, pages: Sequence[int]) -> None:
        """Pages of a match that are used now."""
        self._clock += 1
        for page in pages:
            self.by_page[page].used = self._clock
        if pages:
            self._offer(self.by_page[pages[-1]])

    def insert(self, keys: Sequence[bytes], tokens: Sequence[int], table: Sequence[int]) -> None:
        """Keeps the full pages of a table; stops where another page already holds the same prefix.

        Args:
            keys: Of the pages to keep, from the first.
            tokens: The text.
            table: Its pages.
        """
        self._clock += 1
        parent = None
        for index, (key, page) in enumerate(zip(keys, table, strict=False)):
            node = self.nodes.get(key)
            if node is None:
                node = Node(key, page, self._page(tokens, index), parent, self._clock)
                self.nodes[key] = self.by_page[page] = node
                if parent is not None:
                    parent.children.add(node)
                self.pool.set_cached(page, True)
            elif node.page != page:
                break
            node.used = self._clock
            parent = node
        if parent is not None:
            self._offer(parent)

    def forget(self, pages: Sequence[int]) -> None:
        """Drops pages and all that hangs below them: their entries are not to be trusted."""
        for page in pages:
            if page in self.by_page:
                self._drop(self.by_page[page])

    def check(self) -> None:
        """Raises IntegrityError where nodes, pages and references contradict each other."""
        for node in self.nodes.values():
            parent = node.parent
            if self.by_page.get(node.page) is not node or not self.pool.is_cached[node.page]:
                raise IntegrityError(f"prefix: page {node.page} is in the tree, but not known as cached")
            if parent is not None and (self.nodes.get(parent.key) is not parent or node not in parent.children):
                raise IntegrityError(f"prefix: page {node.page} hangs below page {parent.page}, which is gone")
            if parent is not None and self.pool.references[parent.page] < self.pool.references[node.page]:
                raise IntegrityError(f"prefix: page {node.page} is in use without page {parent.page} before it")
        if len(self.by_page) != len(self.nodes) or sum(self.pool.is_cached) != len(self.nodes):
            raise IntegrityError(f"prefix: {len(self.nodes)} nodes for {len(self.by_page)} pages")

    def _page(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.page_tokens : (index + 1) * self.page_tokens])

    def _offer(self, node: Node) -> None:
        if not node.children:
            heapq.heappush(self._leaves, (node.used, node.page, node.key))
        if len(self._leaves) > 4 * len(self.nodes) + 64:
            self._leaves = [(n.used, n.page, n.key) for n in self.nodes.values() if not n.children]
            heapq.heapify(self._leaves)

    def _evict(self) -> None:
        """Gives up the leaf that was used longest ago, of those in the state cached."""
        passed = []
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            node = self.nodes.get(entry[2])
            if node is None or node.children or node.used != entry[0]:
                continue
            if self.pool.state(node.page) == "cached":
                self._drop(node)
                self.evicted += 1
                break
            passed.append(entry)
        else:
            raise IntegrityError("prefix: pages are idle, but every leaf of the cache is in use")
        for entry in passed:
            heapq.heappush(self._leaves, entry)

    def _drop(self, top: Node) -> None:
        """Forgets a node and all that hangs below it."""
        if top.parent is not None:
            top.parent.children.discard(top)
            self._offer(top.parent)
        below = [top]
        while below:
            node = below.pop()
            below.extend(node.children)
            del self.nodes[node.key], self.by_page[node.page]
            self.pool.set_cached(node.page, False)
