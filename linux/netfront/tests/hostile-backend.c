// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hostile backend for tests of the guest driver: takes over the rings of a queue whose backend has
 * died, and breaks the protocol in one way.
 *
 *     hostile-backend DOMID TX-RING-REF RX-RING-REF EVENT-CHANNEL ATTACK
 *
 * It maps both rings, binds the event channel, waits until the guest has posted a TX request,
 * attacks, and notifies the guest for a while. It uses the devices /dev/xen/gntdev and
 * /dev/xen/evtchn alone.
 */
#include <fcntl.h>
#include <linux/types.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

/* The kernel's headers use these types and do not define them. */
typedef __u16 domid_t;
typedef __u32 grant_ref_t;
#include <xen/evtchn.h>
#include <xen/gntdev.h>

#define RING 256

struct tx_ring {
	__u32 req_prod, req_event, rsp_prod, rsp_event, pad[12];
	union {
		struct { __u32 gref; __u16 offset, flags, id, size; } req;
		struct { __u16 id; __s16 status; } rsp;
	} slot[RING];
};

struct rx_ring {
	__u32 req_prod, req_event, rsp_prod, rsp_event, pad[12];
	union {
		struct { __u16 id, pad; __u32 gref; } req;
		struct { __u16 id, offset, flags; __s16 status; } rsp;
		struct { __u8 type, flags, data[6]; } extra;
	} slot[RING];
};

enum { BLANK = 2, VALIDATED = 1, MORE = 4, EXTRA = 8 };

static volatile struct tx_ring *tx;
static volatile struct rx_ring *rx;

static void fail(const char *what)
{
	perror(what);
	exit(2);
}

static void *map(int device, __u32 domid, __u32 ref)
{
	struct ioctl_gntdev_map_grant_ref op = { .count = 1, .refs = { { domid, ref } } };
	void *page;

	if (ioctl(device, IOCTL_GNTDEV_MAP_GRANT_REF, &op))
		fail("map");
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, device, op.index);
	if (page == MAP_FAILED)
		fail("mmap");
	return page;
}

/* Answers the next TX request. */
static void answer(__u16 id, __s16 status)
{
	tx->slot[tx->rsp_prod % RING].rsp.id = id;
	tx->slot[tx->rsp_prod % RING].rsp.status = status;
	__sync_synchronize();
	tx->rsp_prod++;
}

/* Writes the RX response of the slot `ahead` slots ahead. */
static void respond(__u32 ahead, __u16 offset, __u16 flags, __s16 status)
{
	__u32 slot = (rx->rsp_prod + ahead) % RING;

	rx->slot[slot].rsp.id = slot;
	rx->slot[slot].rsp.offset = offset;
	rx->slot[slot].rsp.flags = flags;
	rx->slot[slot].rsp.status = status;
}

static void extra(__u32 ahead, __u8 type, __u8 flags)
{
	__u32 slot = (rx->rsp_prod + ahead) % RING, i;

	rx->slot[slot].extra.type = type;
	rx->slot[slot].extra.flags = flags;
	for (i = 0; i < 6; i++)
		rx->slot[slot].extra.data[i] = rand();
}

static void publish(__u32 slots)
{
	__sync_synchronize();
	rx->rsp_prod += slots;
}

/* Packets of random shape whose chains are well formed: the driver must take or drop each. */
static void strange_packets(void)
{
	int i;

	for (i = 0; i < 200; i++) {
		__u16 flags = rand() & 0xfff0, size = rand() % 4097;

		if (rand() % 2)
			flags |= rand() & (BLANK | VALIDATED);
		if (rand() % 2) {
			respond(0, rand() % (4097 - size), flags | EXTRA, size);
			extra(1, rand() % 8, 0);
			publish(2);
		} else if (rand() % 2) {
			respond(0, 0, flags | MORE, rand() % 5 ? 4096 : -1);
			respond(1, 0, MORE, 0);
			respond(2, rand() % (4097 - size), 0, size);
			publish(3);
		} else {
			respond(0, rand() % (4097 - size), flags,
				rand() % 8 ? size : -(rand() % 32768));
			publish(1);
		}
		usleep(1000);
	}
}

static int attack(const char *name)
{
	__u32 i;

	if (!strcmp(name, "tx-index")) {
		tx->rsp_prod += 1000;
	} else if (!strcmp(name, "tx-id")) {
		answer(0xffff, 0);
	} else if (!strcmp(name, "tx-idle-id")) {
		/* No ring is so full that all of these are in flight. */
		for (i = 0; tx->rsp_prod != tx->req_prod; i++)
			answer(255, 0);
		answer(255, 0);
	} else if (!strcmp(name, "tx-null")) {
		answer(0, 1);
	} else if (!strcmp(name, "rx-index")) {
		rx->rsp_prod += 5000;
	} else if (!strcmp(name, "rx-id")) {
		respond(0, 0, 0, 60);
		rx->slot[rx->rsp_prod % RING].rsp.id = 0x7777;
		publish(1);
	} else if (!strcmp(name, "rx-offset")) {
		respond(0, 4000, 0, 97);
		publish(1);
	} else if (!strcmp(name, "rx-size")) {
		respond(0, 0xffff, 0, 0x7fff);
		publish(1);
	} else if (!strcmp(name, "rx-slots")) {
		for (i = 0; i < 200; i++)
			respond(i, 0, MORE, 4096);
		publish(200);
	} else if (!strcmp(name, "rx-extras")) {
		respond(0, 0, EXTRA, 60);
		for (i = 1; i < 100; i++)
			extra(i, 1, 1);
		publish(100);
	} else if (!strcmp(name, "rx-strange")) {
		strange_packets();
	} else {
		return -1;
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct ioctl_evtchn_bind_interdomain bind;
	struct ioctl_evtchn_notify notify;
	int grants, events, port, i;
	__u32 domid;

	if (argc != 6) {
		fprintf(stderr,
			"usage: hostile-backend DOMID TX-RING-REF RX-RING-REF EVENT-CHANNEL ATTACK\n");
		return 2;
	}
	domid = atoi(argv[1]);
	grants = open("/dev/xen/gntdev", O_RDWR);
	events = open("/dev/xen/evtchn", O_RDWR);
	if (grants < 0 || events < 0)
		fail("/dev/xen");
	tx = map(grants, domid, atoi(argv[2]));
	rx = map(grants, domid, atoi(argv[3]));
	bind.remote_domain = domid;
	bind.remote_port = atoi(argv[4]);
	port = ioctl(events, IOCTL_EVTCHN_BIND_INTERDOMAIN, &bind);
	if (port < 0)
		fail("bind");
	for (i = 0; i < 200 && tx->req_prod == tx->rsp_prod; i++)
		usleep(50000);
	printf("TX %u of %u, RX %u of %u\n", tx->rsp_prod, tx->req_prod, rx->rsp_prod,
	       rx->req_prod);
	if (attack(argv[5])) {
		fprintf(stderr, "unknown attack %s\n", argv[5]);
		return 2;
	}
	notify.port = port;
	for (i = 0; i < 10; i++) {
		ioctl(events, IOCTL_EVTCHN_NOTIFY, &notify);
		usleep(50000);
	}
	return 0;
}
