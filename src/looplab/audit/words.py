"""Words: plans written in operator classes, and what it costs to run a set of them.

The state after a plan depends only on its word, and it can only be made by one application from the state of the word
without its last letter. So every distinct non-empty prefix of a requested word is made once, and once is enough:

    N_min = nodes of the trie of the requested words, root excluded        (applications per document and noise seed)

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation". Deviation: the original runs every schedule from the start.
"""

from collections.abc import Iterable, Sequence

from looplab.recurrence.plan import Application, Plan, PlanNode

Word = tuple[tuple[int, int], ...]
"""A plan in operator classes: one (block, class) per application."""


def trie(words: dict[str, tuple[Plan, Word]]) -> PlanNode:
    """The tree of all distinct prefixes of the words, children in the order of the depth-first walk.

    Args:
        words: Schedule name -> its plan and word. Where words share a prefix, the plan named first is run.
    """
    root = PlanNode(None)
    index: dict[int, dict[tuple[int, int], PlanNode]] = {id(root): {}}
    for name, (plan, word) in words.items():
        node = root
        for application, letter in zip(plan, word, strict=True):
            children = index[id(node)]
            if letter not in children:
                children[letter] = child = PlanNode(Application(*application))
                index[id(child)] = {}
                node.children.append(child)
            node = children[letter]
        node.wanted.append(name)
    _order(root)
    return root


def _order(node: PlanNode) -> int:
    """Sorts children so that the one needing most states comes last; returns the states this subtree needs."""
    needs = sorted(((_order(child), i) for i, child in enumerate(node.children)), key=lambda pair: pair[0])
    node.children = [node.children[i] for _, i in needs]
    if not needs:
        return 1
    kept = [1 + need for need, _ in needs[:-1]]  # the node's own state waits for the later children
    return max([needs[-1][0], *kept])


def live_states(root: PlanNode) -> int:
    """Most states held at once by the depth-first walk, the initial one included: the trie's Horton-Strahler number."""
    return _order(root)


def minimal_applications(words: Iterable[Sequence[tuple[int, int]]]) -> int:
    """Fewest applications that make every word: the number of their distinct non-empty prefixes."""
    return len({tuple(word[:n]) for word in words for n in range(1, len(word) + 1)})


def naive_applications(plans: Iterable[Plan]) -> int:
    """Applications when every distinct plan is run alone from the initial state."""
    return sum(len(plan) for plan in set(plans))
