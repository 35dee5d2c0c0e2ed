// SPDX-License-Identifier: GPL-2.0-only
/*
 * Driver of an Intel 82574 network card (QEMU's e1000e) for one frame, in the
 * domain that the card belongs to. The card's registers are at a physical
 * address of that domain. It sends to itself (MAC loopback), so no network is
 * needed.
 *
 *   nic REGISTERS SOURCE TARGET    sends 64 bytes from the frame number SOURCE;
 *                                  the card puts what it receives at TARGET
 *
 * Descriptors are in memory of this process, which a PVH domain's kernel maps
 * one to one. The card is polled.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096ul
#define LENGTH 64
#define DESCRIPTORS 8

/* Registers (82574 datasheet, section 10). */
enum {
	CTRL = 0x0,
	STATUS = 0x8,
	IMC = 0xd8,
	RCTL = 0x100,
	TCTL = 0x400,
	RDBAL = 0x2800,
	RDBAH = 0x2804,
	RDLEN = 0x2808,
	RDH = 0x2810,
	RDT = 0x2818,
	TDBAL = 0x3800,
	TDBAH = 0x3804,
	TDLEN = 0x3808,
	TDH = 0x3810,
	TDT = 0x3818,
};

#define CTRL_RESET (1u << 26)
#define CTRL_LINK_UP (1u << 6)
#define RCTL_ENABLE (1u << 1)
#define RCTL_ALL_UNICAST (1u << 3)
#define RCTL_ALL_MULTICAST (1u << 4)
#define RCTL_LOOPBACK (1u << 6)
#define RCTL_STRIP_CRC (1u << 26)
#define TCTL_ENABLE (1u << 1)
#define TCTL_PAD (1u << 3)
#define SEND_END 1
#define SEND_CRC 2
#define SEND_REPORT 8
#define DONE 1

struct send {
	uint64_t address;
	uint16_t length;
	uint8_t offset, command, status, start;
	uint16_t special;
};
struct receive {
	uint64_t address;
	uint16_t length, checksum;
	uint8_t status, errors;
	uint16_t special;
};

static uint64_t physical(void *p)
{
	int fd = open("/proc/self/pagemap", O_RDONLY);
	uint64_t e = 0;

	if (pread(fd, &e, 8, (uint64_t)p / PAGE * 8) != 8)
		e = 0;
	close(fd);
	return (e & ((1ull << 55) - 1)) * PAGE;
}

int main(int argc, char **argv)
{
	int fd = open("/dev/mem", O_RDWR | O_SYNC), i;
	volatile uint32_t *r;
	char *p;

	if (argc < 4)
		return 2;
	r = mmap(0, 32 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
		 strtoul(argv[1], 0, 0));
	p = mmap(0, PAGE, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE | MAP_LOCKED, -1,
		 0);
	if (r == MAP_FAILED || p == MAP_FAILED) {
		perror("mmap");
		return 1;
	}
	volatile struct send *send = (void *)p;
	volatile struct receive *receive = (void *)(p + PAGE / 2);
	uint64_t at = physical(p);

	r[CTRL / 4] = CTRL_RESET;
	usleep(20000);
	r[IMC / 4] = ~0u;
	r[CTRL / 4] = CTRL_LINK_UP;
	for (i = 0; i < DESCRIPTORS; i++)
		receive[i].address = strtoul(argv[3], 0, 0) * PAGE;
	r[RDBAL / 4] = at + PAGE / 2;
	r[RDBAH / 4] = (at + PAGE / 2) >> 32;
	r[RDLEN / 4] = DESCRIPTORS * sizeof(*receive);
	r[RDH / 4] = 0;
	r[RDT / 4] = DESCRIPTORS - 1;
	r[RCTL / 4] = RCTL_ENABLE | RCTL_ALL_UNICAST | RCTL_ALL_MULTICAST |
		      RCTL_LOOPBACK | RCTL_STRIP_CRC;
	send[0].address = strtoul(argv[2], 0, 0) * PAGE;
	send[0].length = LENGTH;
	send[0].command = SEND_END | SEND_CRC | SEND_REPORT;
	r[TDBAL / 4] = at;
	r[TDBAH / 4] = at >> 32;
	r[TDLEN / 4] = DESCRIPTORS * sizeof(*send);
	r[TDH / 4] = 0;
	r[TCTL / 4] = TCTL_ENABLE | TCTL_PAD;
	r[TDT / 4] = 1;
	for (i = 0; i < 200 &&
		    !((send[0].status & DONE) && (receive[0].status & DONE));
	     i++)
		usleep(10000);
	printf("status %x sent %u received %u\n", r[STATUS / 4],
	       send[0].status & DONE,
	       receive[0].status & DONE ? receive[0].length : 0);
	r[CTRL / 4] = CTRL_RESET;
	return 0;
}
