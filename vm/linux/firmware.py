"""Writes a disk whose boot sector counts its boots: firmware.py IMAGE

The firmware loads the first sector. That program reads the second sector by the firmware, counts in it, and writes it back;
it prints the sector's text on the first serial port, and restarts the machine. From the third boot on it ends the machine by
the device `isa-debug-exit` at port 0xf4, and so it does if the firmware reports an error.
"""
import sys

PROGRAM = bytes.fromhex(
    "31c0 8ed8 8ec0 8ed0 bc007c"  # 00 xor ax,ax; ds = es = ss = ax; mov sp,0x7c00
    "b80102 b90200 b600 bb007e"  # 0b read one sector: the second, of head 0, to 0x7e00
    "cd13 722d"  # 16 int 0x13; jc 47
    "fe06057e"  # 1a inc byte [0x7e05]: the digit in the text
    "b80103 cd13 7222"  # 1e write it back; jc 47
    "be007e baf803"  # 25 mov si,0x7e00; mov dx,0x3f8
    "ac 84c0 7403 ee ebf8"  # 2b lodsb; test al,al; jz 33; out dx,al; jmp 2b
    "803e057e33 7309"  # 33 cmp byte [0x7e05],'3'; jae 43
    "b006 baf90c ee f4 ebfd"  # 3a out 0xcf9,6: reset; 40 hlt; jmp 40
    "b000 e6f4"  # 43 out 0xf4,0
    "b001 e6f4"  # 47 out 0xf4,1
)
SECTOR = 512

with open(sys.argv[1], "wb") as image:
    image.write(PROGRAM.ljust(SECTOR - 2, b"\0") + b"\x55\xaa")
    image.write(b"boot 0\n".ljust(SECTOR, b"\0"))
    image.truncate(16 << 20)
