from looplab.studies.curves import at, reached

CURVE = [(10.0, 4.0), (20.0, 2.0), (40.0, 3.0), (60.0, 1.0)]


def test_a_loss_lies_on_the_line_between_evaluations():
    assert [at(CURVE, x) for x in (10.0, 15.0, 20.0, 30.0, 60.0)] == [4.0, 3.0, 2.0, 2.5, 1.0]


def test_there_is_no_loss_outside_the_curve():
    assert at(CURVE, 9.0) is None
    assert at(CURVE, 61.0) is None
    assert at([], 1.0) is None


def test_a_loss_is_reached_where_the_curve_first_falls_to_it():
    assert reached(CURVE, 3.0) == 15
    assert reached(CURVE, 2.0) == 20
    assert reached(CURVE, 1.5) == 55


def test_a_loss_that_was_there_before_the_first_point_or_never_comes_is_not_reached():
    assert reached(CURVE, 4.0) is None
    assert reached(CURVE, 0.5) is None
