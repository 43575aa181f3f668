"""Sudoku by plain loops over sets: solutions by backtracking, cell after cell, and singles one at a time."""


def peers(size, height, width):
    """cell -> the other cells of its row, column and box."""

    def groups(cell):
        row, column = divmod(cell, size)
        return ("row", row), ("column", column), ("box", row // height, column // width)

    return {
        cell: {other for other in range(size**2) if other != cell and set(groups(cell)) & set(groups(other))}
        for cell in range(size**2)
    }


def solutions(givens, height, width, limit):
    """Up to `limit` full grids that keep the givens; none where givens clash."""
    size = height * width
    near = peers(size, height, width)
    grid, found = list(givens), []
    if any(grid[c] and grid[c] == grid[p] for c in near for p in near[c]):
        return found

    def fill():
        blanks = [c for c in range(size**2) if not grid[c]]
        if not blanks:
            found.append(tuple(grid))
            return
        free = {c: set(range(1, size + 1)) - {grid[p] for p in near[c]} for c in blanks}
        cell = min(blanks, key=lambda c: len(free[c]))
        for digit in sorted(free[cell]):
            grid[cell] = digit
            fill()
            grid[cell] = 0
            if len(found) >= limit:
                return

    fill()
    return found


def singles(givens, height, width, *, naked):
    """cell -> digits left, after every naked (and hidden) single has been used."""
    size = height * width
    near = peers(size, height, width)
    units = [[r * size + c for c in range(size)] for r in range(size)]
    units += [[r * size + c for r in range(size)] for c in range(size)]
    units += [
        [(top + r) * size + left + c for r in range(height) for c in range(width)]
        for top in range(0, size, height)
        for left in range(0, size, width)
    ]
    left = {c: {givens[c]} if givens[c] else set(range(1, size + 1)) for c in range(size**2)}
    changed = True
    while changed:
        changed = False
        for cell in left:
            if len(left[cell]) == 1:
                for other in near[cell]:
                    if left[other] & left[cell]:
                        left[other] -= left[cell]
                        changed = True
        for unit in [] if naked else units:
            for digit in range(1, size + 1):
                places = [c for c in unit if digit in left[c]]
                if len(places) == 1 and left[places[0]] != {digit}:
                    left[places[0]] = {digit}
                    changed = True
    return left
