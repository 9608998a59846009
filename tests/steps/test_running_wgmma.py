"""What is found of registers that a running wgmma still uses: listings by hand, and changes of them
each of which is wrong in one way."""

from __future__ import annotations

import re

import pytest

from tests.steps.running_wgmma import misused

RIGHT = """
        /*0010*/                   LDS.128 R8, [R4] ;
.L_x_1:
        /*0020*/                   HFMA2 R24, R8, R5.reuse, R6 ;
        /*0030*/                   HFMA2 R31, R9, R5, R6 ;
        /*0040*/                   WARPGROUP.ARRIVE ;
        /*0050*/                   HGMMA.64x8x16.F32 R40, R24, gdesc[UR16], R40, !UPT ;
        /*0060*/                   LDS.64 R36, [R4+0x200] ;
        /*0070*/                   HGMMA.64x8x16.F32 R40, R28.reuse, gdesc[UR20], R40, gsb0 ;
        /*0080*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0090*/              @!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R23+URZ], RZ ;
        /*00a0*/                   LOP3.LUT P1, RZ, R24, 0x1f, RZ, 0xc0, !PT ;
        /*00b0*/                   BSSY B1, `(.L_x_3) ;
        /*00c0*/              @!P1 BRA `(.L_x_4) ;
        /*00d0*/                   IMAD.MOV.U32 R32, RZ, RZ, R36 ;
.L_x_4:
        /*00e0*/                   BSYNC B1 ;
.L_x_3:
        /*00f0*/                   WARPGROUP.ARRIVE ;
        /*0100*/                   HGMMA.64x8x16.F32 R44, R32, gdesc[UR20], R44, gsb0 ;
        /*0110*/               @P0 BRA `(.L_x_2) ;
        /*0120*/                   LDS.128 R8, [R4] ;
        /*0130*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0140*/                   BRA `(.L_x_1) ;
.L_x_2:
        /*0150*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0160*/                   STG.E.128 desc[UR8][R2.64], R44 ;
        /*0170*/                   EXIT ;
"""


def with_line(address: str, text: str) -> str:
    """The listing with another instruction at an address."""
    changed, count = re.subn(rf"(/\*{address}\*/\s+).*;", rf"\g<1>{text} ;", RIGHT)
    assert count == 1
    return changed


def test_registers_that_nothing_touches_in_time() -> None:
    assert misused(RIGHT) == []
    assert misused(with_line("00d0", "BAR.SYNC.DEFER_BLOCKING R24, R25")) == []
    assert misused(with_line("00d0", "CS2R.32 R29, SR_CLOCKLO")) != []


@pytest.mark.parametrize(
    ("address", "text", "found"),
    [
        ("0060", "LDS.64 R26, [R4+0x200]", "writes the operand R26, R27"),  # not yet committed
        ("0120", "LDS.128 R30, [R4]", "writes the operand R32, R33"),  # the second group runs
        ("0030", "HFMA2 R35, R9, R5, R6", "writes the operand R35"),  # in the next turn
        ("00a0", "LOP3.LUT P1, R31, R24, 0x1f, RZ, 0xc0, !PT", "writes the operand R31"),
        ("00d0", "IMAD.MOV.U32 R28, RZ, RZ, R36", "writes the operand R28"),  # on one of two paths
        ("00d0", "IMAD.WIDE R42, R8, R9, R10", "writes the accumulator R42, R43"),
        ("0030", "HFMA2 R31, R44, R5, R6", "reads the accumulator R44"),
        ("0120", "STS.64 [R8], R46", "reads the accumulator R46, R47"),
        ("0100", "HGMMA.64x8x16.F32 R42, R32, gdesc[UR20], R42, gsb0", "adds to the accumulator"),
    ],
)
def test_each_misuse_is_found(address: str, text: str, found: str) -> None:
    wrong = misused(with_line(address, text))
    assert any(one.startswith(f"{address}: {text}: {found}") for one in wrong), wrong


def test_operands_of_two_groups_are_found_where_the_first_is_waited_for_alone() -> None:
    shared = misused(with_line("0100", "HGMMA.64x8x16.F32 R44, R28, gdesc[UR20], R44, gsb0"))
    assert [one[:4] for one in shared] == ["0030"]


def test_a_wait_too_little_is_found() -> None:
    missing = misused(with_line("0130", "NOP"))
    assert [one[:4] for one in missing] == ["0020", "0030"]
    (at_the_end,) = misused(with_line("0150", "WARPGROUP.DEPBAR.LE gsb0, 0x1"))
    assert at_the_end.startswith("0160")
    with pytest.raises(AssertionError, match="none is waited for"):
        misused(re.sub("WARPGROUP.DEPBAR.*;", "NOP ;", RIGHT))


@pytest.mark.parametrize(
    ("address", "text", "said"),
    [
        ("0050", "HGMMA.64x8x16.F32 R40, gdesc[UR16], R40", "its A is no register"),
        ("0050", "HGMMA.SP.64x8x32.F32 R40, R24, gdesc[UR16], R40", "no metadata"),
        ("0140", "BRX R4 -0x20", "a branch to anywhere"),
        ("0020", "EXIT", "no path leads to"),
    ],
)
def test_what_cannot_be_followed_is_said(address: str, text: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        misused(with_line(address, text))
