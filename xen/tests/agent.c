// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test agent in a guest: plays the granter and the grantee of grant windows,
 * honest or not.
 *
 *   agent serve            keeps the state; takes commands from /run/agent.in,
 *                          answers in /run/agent.out
 *   agent COMMAND...       sends one command to it and prints the answer
 *   agent log-dirty D OP   in dom0: log-dirty mode of a domain (2: on, 0: off)
 *   agent assign D SBDF    in dom0: gives a PCI device to a domain; its
 *                          registers stay within dom0's reach
 *   agent tick FILE        in dom0: writes the number of seconds, as interrupts
 *                          of the clock count them, to FILE
 *   agent dma FILE read|write ADDRESS    in dom0: has QEMU's device edu, whose
 *                                        registers FILE is, copy 64 bytes from
 *                                        memory at an address of its domain
 *                                        into its buffer, or from there to
 *                                        memory
 *
 * Most commands go to the hypervisor by window-raw, so that every argument can
 * be wrong. Those that start with `dev` use /dev/ringfence-window as a backend
 * or a frontend would.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/rtc.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include "grant_window.h"
#include "ringfence-window.h"

typedef uint64_t u64;
#define PAGE 4096ul
#define PAGES 4096u

static char *own;			/* the granter's pages */
static char *window;			/* the grantee's mapping */
static struct gnttab_window_slot *slots;
static int dev = -1;

static int raw(void)
{
	static int fd = -1;

	if (fd < 0 && (fd = open("/dev/window-raw", O_RDWR | O_CLOEXEC)) < 0)
		perror("window-raw");
	return fd;
}

static long call(unsigned int cmd, void *arg, unsigned int count)
{
	u64 c[3] = { cmd, (u64)arg, count };
	long rc = ioctl(raw(), 0x7701, c);

	return rc < 0 ? -errno : rc;
}

static void *pages(unsigned int n)
{
	void *p = mmap(0, n * PAGE, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE | MAP_LOCKED,
		       -1, 0);

	if (p == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	memset(p, 0, n * PAGE);
	return p;
}

static u64 frame(void *p)
{
	static int fd = -1;
	u64 e;

	if (fd < 0)
		fd = open("/proc/self/pagemap", O_RDONLY);
	if (pread(fd, &e, 8, (u64)p / PAGE * 8) != 8)
		return 0;
	return ioctl(raw(), 0x7702, e & ((1ull << 55) - 1));
}

/* A thread that does one thing over and over. */
static volatile int spinning, churning, fuzzing, touching;
static volatile unsigned int spin_ref, touch_n;
static volatile u64 spins, spun_gone, spun_other, expected, touched;

static void *spin(void *unused)
{
	while (spinning) {
		u64 v = *(volatile u64 *)(window + spin_ref * PAGE);

		spins++;
		if (v == ~0ull)
			spun_gone++;
		else if (v != expected)
			spun_other++;
	}
	return unused;
}

/* Reads and writes pages of the window whether they are issued or not. */
static void *touch_all(void *unused)
{
	while (touching) {
		volatile u64 *p = (void *)(window + rand() % touch_n * PAGE +
					   rand() % 512 * 8);

		if (rand() % 4)
			(void)*p;
		else
			p[0] = 7;
		touched++;
	}
	return unused;
}

static unsigned int churn_handle, churn_n;
static volatile u64 rounds, issued, not_issued, revoked, throttled, not_revoked;
static int last_issue, last_revoke;

static void *churn(void *unused)
{
	struct gnttab_window_issue *x = pages(churn_n * sizeof(*x) / PAGE + 1);
	struct gnttab_window_revoke *r = pages(churn_n * sizeof(*r) / PAGE + 1);

	while (churning) {
		unsigned int n = 1 + rand() % churn_n;
		unsigned int at = rand() % (churn_n - n + 1), k;

		for (k = 0; k < n; k++) {
			x[k] = (struct gnttab_window_issue){
				churn_handle, at + k,
				frame(own + (at + k) * PAGE)
			};
			r[k] = (struct gnttab_window_revoke){
				churn_handle, at + k, GNTWIN_force
			};
		}
		call(GNTTABOP_window_issue, x, n);
		call(GNTTABOP_window_revoke, r, n);
		rounds++;
		for (k = 0; k < n; k++) {
			if (x[k].status)
				not_issued++, last_issue = x[k].status;
			else
				issued++;
			if (!r[k].status)
				revoked++;
			else if (r[k].status == -12)
				throttled++;
			else
				not_revoked++, last_revoke = r[k].status;
		}
	}
	return unused;
}

/* Random operations with arguments at and beyond every limit. */
static volatile u64 fuzzed, accepted, accepted_of[6];
static unsigned int fuzz_peer, fuzz_operations;

static u64 odd(void)
{
	static const u64 values[] = {
		0,	    1,		2,	    63,		64,
		65,	    511,	512,	    4095,	4096,
		4097,	    0x7ff0,	0x7fff,	    0xffff,	1ull << 31,
		0xffffffff, 1ull << 32, 1ull << 40, 1ull << 52, ~0ull
	};

	return values[rand() % (sizeof(values) / 8)];
}

/*
 * A frame for a table that is not one: the hypervisor clears tables, so none of
 * our own kernel's.
 */
static u64 odd_frame(void)
{
	u64 gfn = odd();

	return gfn >> 20 ? gfn : gfn << 20;
}

/* An operation whose first element the hypervisor carried out. */
static int good(unsigned int cmd, void *args)
{
	switch (cmd) {
	case GNTTABOP_window_create:
		return !((struct gnttab_window_create *)args)->status;
	case GNTTABOP_window_register:
		return !((struct gnttab_window_register *)args)->status;
	case GNTTABOP_window_issue:
		return !((struct gnttab_window_issue *)args)->status;
	case GNTTABOP_window_revoke:
		return !((struct gnttab_window_revoke *)args)->status;
	case GNTTABOP_window_destroy:
		return !((struct gnttab_window_destroy *)args)->status;
	}
	return 1;
}

/*
 * Handles of our windows, and those that the peer had when the scenario last
 * told us.
 */
static uint32_t own_handles[32], peer_handles[32];

static uint32_t some_handle(int peers)
{
	if (rand() % 8 == 0)
		return rand() % 2 ? rand() : odd();
	return (peers ? peer_handles : own_handles)[rand() % 32];
}

/* Writes our handles in the form in which fuzz_peer_has() takes them. */
static void fuzz_has(char *out)
{
	for (unsigned int i = 0; i < 32; i++)
		out += sprintf(out, "%s%x", i ? "," : "", own_handles[i]);
}

static void fuzz_peer_has(char *list)
{
	for (unsigned int i = 0; i < 32 && *list; i++, list += !!*list)
		peer_handles[i] = strtoul(list, &list, 16);
}

static void *fuzz(void *unused)
{
	static u64 own_frames[PAGES];
	static char *table;
	char *args = pages(5);
	u64 *gfns = pages(1);
	u64 base = 0x100000;
	FILE *f = fopen("/sys/module/ringfence_window/parameters/base", "r");

	if (f) {
		if (fscanf(f, "%lx", &base) != 1)
			base = 0x100000;
		fclose(f);
	}
	/*
	 * An array that is longer than its memory ends here. Otherwise the
	 * hypervisor would work through all our memory.
	 */
	mprotect(args + 4 * PAGE, PAGE, PROT_NONE);
	table = pages(8);
	for (unsigned int i = 0; i < PAGES; i++)
		own_frames[i] = frame(own + i * PAGE);
	while (fuzzing) {
		unsigned int cmd = 0x40 + rand() % 6;
		unsigned int count = rand() % 8 ? 1 + rand() % 80 : odd(), i;
		u64 *a = (u64 *)args;
		int peers = cmd == GNTTABOP_window_register ||
			    (cmd == GNTTABOP_window_destroy && rand() % 2);
		uint32_t handle = some_handle(peers);
		uint32_t entries = rand() % 8 ? 64 : rand() % 2 ? 4096 : odd();

		for (i = 0; i < 512; i++)
			a[i] = rand() % 3 ? odd() :
					    ((u64)rand() << 32 | rand());
		for (i = 0; i < 8; i++)
			gfns[i] = rand() % 16 ? frame(table + i * PAGE) :
						odd_frame();
		if (!(fuzz_operations >> (cmd - 0x40) & 1))
			continue;
		/* Most creations find all places taken. */
		if (cmd == GNTTABOP_window_create && rand() % 4)
			continue;
		if (cmd == GNTTABOP_window_create) {
			struct gnttab_window_create *c = (void *)args;

			*c = (struct gnttab_window_create){
				rand() % 8 ? fuzz_peer : odd(), 0, entries
			};
		} else if (cmd == GNTTABOP_window_register) {
			struct gnttab_window_register *r = (void *)args;

			*r = (struct gnttab_window_register){
				rand() % 8 ? fuzz_peer : odd(),
				0,
				handle,
				rand() % 4 ? base + rand() % 32768 : odd(),
				rand() % 8 ? (u64)gfns : odd(),
				entries
			};
		} else if (cmd == GNTTABOP_window_issue && rand() % 4) {
			struct gnttab_window_issue *x = (void *)args;

			for (i = 0; i < 80; i++)
				x[i] = (struct gnttab_window_issue){
					handle,
					rand() % 4 ? rand() % 70 : odd(),
					rand() % 4 ?
						own_frames[rand() % PAGES] :
						odd(),
					rand() % 8 ? rand() % 2 : odd()
				};
		} else if (cmd == GNTTABOP_window_revoke && rand() % 4) {
			struct gnttab_window_revoke *r = (void *)args;

			for (i = 0; i < 80; i++)
				r[i] = (struct gnttab_window_revoke){
					handle,
					rand() % 4 ? rand() % 70 : odd(),
					rand() % 8 ? rand() % 2 : odd()
				};
		} else if (cmd == GNTTABOP_window_destroy && rand() % 32) {
			/* Rarely, so that windows live. */
			continue;
		} else if (cmd == GNTTABOP_window_destroy) {
			struct gnttab_window_destroy *d = (void *)args;

			*d = (struct gnttab_window_destroy){
				!peers	   ? 0x7ff0 :
				rand() % 8 ? fuzz_peer :
					     odd(),
				0, handle
			};
		}
		if (cmd != GNTTABOP_window_issue &&
		    cmd != GNTTABOP_window_revoke)
			count = rand() % 16 ? 1 : count;
		if (!call(cmd, rand() % 64 ? (void *)args : (void *)odd(),
			  count) && good(cmd, args))
			accepted++, accepted_of[cmd - 0x40]++;
		if (cmd == GNTTABOP_window_create &&
		    !((struct gnttab_window_create *)args)->status) {
			uint32_t made =
				((struct gnttab_window_create *)args)->handle;

			own_handles[made % 32] = made;
		}
		fuzzed++;
	}
	return unused;
}

static void start(void *(*f)(void *))
{
	pthread_t t;

	pthread_create(&t, 0, f, 0);
	pthread_detach(t);
}

static sigjmp_buf back;
static volatile int caught;

static void on_signal(int s)
{
	caught = s;
	siglongjmp(back, 1);
}

static int words;
static char *word[16];
#define N(k) (words > (k) ? strtoul(word[k], 0, 0) : 0)

static void do_issue(char *out)
{
	unsigned int k = words > 5 ? N(5) : 1, i, ok = 0;
	struct gnttab_window_issue *x = pages(k * sizeof(*x) / PAGE + 1);
	int other = 0;
	long rc;

	for (i = 0; i < k; i++)
		x[i] = (struct gnttab_window_issue){
			N(1), N(2) + i, frame(own + (N(3) + i) * PAGE), N(4)
		};
	rc = call(GNTTABOP_window_issue, x, k);
	for (i = 0; i < k; i++)
		if (x[i].status)
			other = x[i].status;
		else
			ok++;
	munmap(x, (k * sizeof(*x) / PAGE + 1) * PAGE);
	sprintf(out, "rc %ld ok %u other %d", rc, ok, other);
}

static void do_revoke(char *out)
{
	unsigned int k = words > 4 ? N(4) : 1, i, ok = 0;
	struct gnttab_window_revoke *x = pages(k * sizeof(*x) / PAGE + 1);
	int other = 0;
	long rc;

	for (i = 0; i < k; i++)
		x[i] = (struct gnttab_window_revoke){ N(1), N(2) + i, N(3) };
	rc = call(GNTTABOP_window_revoke, x, k);
	for (i = 0; i < k; i++)
		if (x[i].status)
			other = x[i].status;
		else
			ok++;
	munmap(x, (k * sizeof(*x) / PAGE + 1) * PAGE);
	sprintf(out, "rc %ld ok %u other %d", rc, ok, other);
}

/*
 * Issues a page, revokes it, and changes it at once: a reader with a stale
 * translation sees the change.
 */
static void canary(char *out)
{
	volatile u64 *page = (void *)(own + N(3) * PAGE);
	u64 honest = *page, f = frame((void *)page);
	unsigned int i, good = 0;

	for (i = 0; i < N(4); i++) {
		struct gnttab_window_issue x = { N(1), N(2), f };
		struct gnttab_window_revoke r = { N(1), N(2), GNTWIN_force };
		volatile unsigned int k;

		*page = honest;
		call(GNTTABOP_window_issue, &x, 1);
		for (k = 0; k < 20000; k++)
			;
		call(GNTTABOP_window_revoke, &r, 1);
		*page = 0x544552434553;
		for (k = 0; k < 20000; k++)
			;
		good += !x.status && !r.status;
	}
	sprintf(out, "rounds %u", good);
}

/*
 * Tries to issue every frame below 4 GiB that is not the granter's own memory:
 * grant table, scratch frames, holes.
 */
static void do_issue_special(char *out)
{
	static struct gnttab_window_issue x[64];
	static struct gnttab_window_revoke r[1];
	static unsigned char ram[1 << 20];
	unsigned int tried = 0, issued = 0, k = 0;
	char line[256];
	FILE *f = fopen("/proc/iomem", "r");
	u64 a, b, gfn;

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "%lx-%lx", &a, &b) == 2 &&
		    (strstr(line, "System RAM") ||
		     strstr(line, "ACPI Tables") || strstr(line, "Reserved")))
			for (gfn = a >> 12; gfn <= b >> 12 && gfn < sizeof(ram);
			     gfn++)
				ram[gfn] = 1;
	if (f)
		fclose(f);
	/*
	 * The toolstack puts the console's and the store's pages here, which
	 * are memory of the domain.
	 */
	for (gfn = 0xfeff8; gfn <= 0xfefff; gfn++)
		ram[gfn] = 1;
	for (gfn = 0x100; gfn < sizeof(ram); gfn++) {
		if (!ram[gfn]) {
			x[k] = (struct gnttab_window_issue){ N(1), k, gfn,
							     GNTWIN_readonly };
			k++;
		}
		if (!k || (k < 64 && gfn + 1 < sizeof(ram)))
			continue;
		call(GNTTABOP_window_issue, x, k);
		for (unsigned int i = 0; i < k; i++)
			if (!x[i].status) {
				r[0] = (struct gnttab_window_revoke){
					N(1), i, GNTWIN_force
				};
				call(GNTTABOP_window_revoke, r, 1);
				issued++;
			}
		tried += k;
		k = 0;
	}
	sprintf(out, "tried %u issued %u", tried, issued);
}

/*
 * Prints the frame at which the first page of our grant table is: a page of the
 * hypervisor that is in our address space.
 */
static void grant_frame(char *out)
{
	u64 frame = 0;
	/*
	 * struct gnttab_setup_table; it makes nothing, because the kernel has
	 * that page since it started.
	 */
	struct {
		uint16_t domain;
		uint32_t frames;
		int16_t status;
		u64 *list;
	} x = { 0x7ff0, 1, 0, &frame };
	long rc = call(2, &x, 1);

	sprintf(out, "rc %ld status %d frame %#lx", rc, x.status, frame);
}

/*
 * Makes one of our pages one that is granted in the ordinary way, too, by
 * /dev/xen/gntalloc.
 */
static void do_grant(char *out)
{
	struct {
		uint16_t domain, flags;
		uint32_t count;
		u64 index;
		uint32_t ref, pad;
	} x = { N(1), 1, 1 };
	int fd = open("/dev/xen/gntalloc", O_RDWR | O_CLOEXEC);
	char *at = own + N(2) * PAGE;

	if (ioctl(fd, _IOC(_IOC_NONE, 'G', 5, sizeof(x)), &x) ||
	    mmap(at, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
		 x.index) != at)
		sprintf(out, "%s", strerror(errno));
	else
		sprintf(out, "ref %u", x.ref);
}

/* The granter's raw commands. */
static int granter(const char *c, char *out)
{
	if (!strcmp(c, "create")) {		/* GRANTEE ENTRIES */
		struct gnttab_window_create x = { .grantee = N(1),
						  .nr_entries = N(2) };
		long rc = call(GNTTABOP_window_create, &x, 1);

		sprintf(out, "rc %ld status %d handle %u", rc, x.status,
			x.handle);
	} else if (!strcmp(c, "issue")) {
		/* HANDLE REF PAGE FLAGS [COUNT] */
		do_issue(out);
	} else if (!strcmp(c, "issue-gfn")) {	/* HANDLE REF GFN FLAGS */
		struct gnttab_window_issue x = { N(1), N(2), N(3), N(4) };
		long rc = call(GNTTABOP_window_issue, &x, 1);

		sprintf(out, "rc %ld status %d", rc, x.status);
	} else if (!strcmp(c, "issue-table")) {
		/* HANDLE REF FLAGS: our top page table */
		struct gnttab_window_issue x = { N(1), N(2),
						 ioctl(raw(), 0x7703, 0),
						 N(3) };
		long rc = call(GNTTABOP_window_issue, &x, 1);

		sprintf(out, "rc %ld status %d", rc, x.status);
	} else if (!strcmp(c, "grant-frame")) {
		grant_frame(out);
	} else if (!strcmp(c, "issue-special")) {	/* HANDLE */
		do_issue_special(out);
	} else if (!strcmp(c, "revoke")) {	/* HANDLE REF FLAGS [COUNT] */
		do_revoke(out);
	} else if (!strcmp(c, "destroy")) {	/* GRANTER HANDLE */
		struct gnttab_window_destroy x = { .granter = N(1),
						   .handle = N(2) };
		long rc = call(GNTTABOP_window_destroy, &x, 1);

		sprintf(out, "rc %ld status %d", rc, x.status);
	} else if (!strcmp(c, "grant")) {	/* GRANTEE PAGE */
		do_grant(out);
	} else if (!strcmp(c, "fill")) {	/* PAGE TEXT */
		strcpy(own + N(1) * PAGE, word[2]);
		sprintf(out, "ok");
	} else if (!strcmp(c, "peek")) {	/* PAGE */
		sprintf(out, "%.40s", own + N(1) * PAGE);
	} else if (!strcmp(c, "canary")) {	/* HANDLE REF PAGE ROUNDS */
		canary(out);
	} else if (!strcmp(c, "churn")) {	/* HANDLE REFS */
		churn_handle = N(1), churn_n = N(2), churning = 1;
		start(churn);
		sprintf(out, "ok");
	} else if (!strcmp(c, "churned")) {	/* [stop] */
		churning = !words || words < 2;
		sprintf(out,
			"rounds %lu issued %lu not %lu (%d) "
			"revoked %lu throttled %lu not %lu (%d)",
			rounds, issued, not_issued, last_issue, revoked,
			throttled, not_revoked, last_revoke);
	} else {
		return 0;
	}
	return 1;
}

static void do_read(char *out)
{
	u64 v;

	caught = 0;
	if (sigsetjmp(back, 1)) {
		sprintf(out, "signal %d", caught);
		return;
	}
	v = *(volatile u64 *)(window + N(1) * PAGE);
	if (v == ~0ull)
		sprintf(out, "gone");
	else
		sprintf(out, "%.40s", window + N(1) * PAGE);
}

/*
 * The window's page as the kernel sees it: write(2), vmsplice, O_DIRECT-like
 * pins.
 */
static void do_pin(char *out)
{
	struct iovec v = { window + N(1) * PAGE, PAGE };
	char a[8] = "", b[8] = "";
	int p[2];
	long w, s;

	if (pipe(p))
		return;
	w = write(p[1], v.iov_base, 4);
	if (w > 0 && read(p[0], a, 4) < 0)
		w = -2;
	s = vmsplice(p[1], &v, 1, 0);
	if (s > 0 && read(p[0], b, 4) < 0)
		s = -2;
	sprintf(out, "write %ld %s vmsplice %ld %s", w, a, s, b);
	close(p[0]);
	close(p[1]);
}

/* Leaves the window's page pinned in a pipe, as a transfer under way does. */
static void do_hold(char *out)
{
	static int p[2];
	struct iovec v = { window + N(1) * PAGE, PAGE };
	long n = pipe(p) ? -1 : vmsplice(p[1], &v, 1, 0);

	sprintf(out, "held %ld", n);
}

static void count(char *out)
{
	unsigned int gone = 0, zero = 0, other = 0, i;

	for (i = 0; i < N(2); i++) {
		u64 v = *(volatile u64 *)(window + (N(1) + i) * PAGE);

		if (v == ~0ull)
			gone++;
		else if (!v)
			zero++;
		else
			other++;
	}
	sprintf(out, "gone %u zero %u other %u", gone, zero, other);
}

/* Ordinary grants, to aim at a window's frames. */
struct map {
	u64 host;
	uint32_t flags, ref;
	uint16_t dom;
	int16_t status;
	uint32_t handle;
	u64 bus;
};
struct unmap { u64 host, bus; uint32_t handle; int16_t status; };

static int grantee(const char *c, char *out)
{
	if (!strcmp(c, "register")) {		/* GRANTER HANDLE ENTRIES GFN */
		unsigned int n = (N(3) * 8 + PAGE - 1) / PAGE, i;
		char *t = pages(n ? n : 1);
		u64 *g = pages(1);
		struct gnttab_window_register x = { .granter = N(1),
						    .handle = N(2),
						    .nr_entries = N(3),
						    .base_gfn = N(4),
						    .table_gfns = (u64)g };
		long rc;

		for (i = 0; i < n && i < 512; i++)
			g[i] = frame(t + i * PAGE);
		rc = call(GNTTABOP_window_register, &x, 1);
		sprintf(out, "rc %ld status %d", rc, x.status);
	} else if (!strcmp(c, "read")) {
		do_read(out);
	} else if (!strcmp(c, "write")) {	/* REF TEXT */
		u64 v = 0;

		memcpy(&v, word[2], strnlen(word[2], 7));
		*(volatile u64 *)(window + N(1) * PAGE) = v;
		sprintf(out, "ok");
	} else if (!strcmp(c, "run")) {		/* REF: executes the page */
		caught = 0;
		if (!sigsetjmp(back, 1))
			((void (*)(void))(window + N(1) * PAGE))();
		sprintf(out, "signal %d", caught);
	} else if (!strcmp(c, "pin")) {
		do_pin(out);
	} else if (!strcmp(c, "hold")) {	/* REF */
		do_hold(out);
	} else if (!strcmp(c, "count")) {	/* REF N */
		count(out);
	} else if (!strcmp(c, "slot")) {	/* REF */
		sprintf(out, "entry %x status %x", slots[N(1)].entry,
			slots[N(1)].status);
	} else if (!strcmp(c, "raise")) {	/* REF VALUE */
		slots[N(1)].status = N(2);
		__sync_synchronize();
		sprintf(out, "entry %x", slots[N(1)].entry);
	} else if (!strcmp(c, "forge")) {	/* REF ENTRY */
		slots[N(1)].entry = N(2);
		sprintf(out, "ok");
	} else if (!strcmp(c, "spin")) {
		spin_ref = N(1),
		expected = *(volatile u64 *)(window + spin_ref * PAGE);
		spins = spun_gone = spun_other = 0, spinning = 1;
		start(spin);
		sprintf(out, "ok");
	} else if (!strcmp(c, "spun")) {
		spinning = words < 2;
		sprintf(out, "spins %lu gone %lu other %lu", spins, spun_gone,
			spun_other);
	} else if (!strcmp(c, "touch")) {	/* PAGES */
		touch_n = N(1), touching = 1;
		start(touch_all);
		sprintf(out, "ok");
	} else if (!strcmp(c, "touched")) {
		touching = words < 2;
		sprintf(out, "touched %lu", touched);
	} else if (!strcmp(c, "map")) {		/* DOMAIN GREF GFN */
		struct map m = { N(3) * PAGE, 2, N(2), N(1) };
		long rc = call(0, &m, 1);

		sprintf(out, "rc %ld status %d handle %u", rc, m.status,
			m.handle);
	} else if (!strcmp(c, "unmap")) {	/* HANDLE GFN */
		struct unmap m = { N(2) * PAGE, 0, N(1) };
		long rc = call(1, &m, 1);

		sprintf(out, "rc %ld status %d", rc, m.status);
	} else {
		return 0;
	}
	return 1;
}

/* /dev/ringfence-window, as programs use it. */
static int device(const char *c, char *out)
{
	if (!strcmp(c, "dev-open")) {
		dev = open("/dev/ringfence-window", O_RDWR | O_CLOEXEC);
		sprintf(out, "%s", dev < 0 ? strerror(errno) : "ok");
	} else if (!strcmp(c, "dev-close")) {
		if (window)
			munmap(window, PAGES * PAGE), munmap(slots, 8 * PAGE);
		window = 0;
		close(dev);
		sprintf(out, "ok");
	} else if (!strcmp(c, "dev-create")) {	/* GRANTEE ENTRIES */
		struct rfwin_create x = { .grantee = N(1), .nr_entries = N(2) };
		int rc = ioctl(dev, RFWIN_CREATE, &x);

		sprintf(out, "%s handle %u", rc ? strerror(errno) : "ok",
			x.handle);
	} else if (!strcmp(c, "dev-register")) {
		/* GRANTER HANDLE ENTRIES */
		struct rfwin_register x = { .granter = N(1),
					    .handle = N(2),
					    .nr_entries = N(3) };

		if (ioctl(dev, RFWIN_REGISTER, &x)) {
			sprintf(out, "%s", strerror(errno));
			return 1;
		}
		slots = mmap(0, x.table_pages * PAGE, PROT_READ | PROT_WRITE,
			     MAP_SHARED, dev, RFWIN_TABLE_OFFSET);
		window = mmap(0, N(3) * PAGE, PROT_READ | PROT_WRITE,
			      MAP_SHARED, dev, RFWIN_PAGES_OFFSET);
		sprintf(out, "%s",
			slots == MAP_FAILED || window == MAP_FAILED ?
				strerror(errno) :
				"ok");
	} else if (!strcmp(c, "dev-issue") || !strcmp(c, "dev-revoke")) {
		/* REF PAGE|- FLAGS [COUNT] */
		unsigned int n = words > 4 ? N(4) : 1, i, ok = 0;
		int issue = c[4] == 'i', other = 0;
		struct rfwin_issue *x = calloc(n, sizeof(*x));
		struct rfwin_revoke *r = calloc(n, sizeof(*r));
		struct rfwin_batch b = { issue ? (u64)x : (u64)r, n };

		for (i = 0; i < n; i++) {
			x[i] = (struct rfwin_issue){
				(u64)own + (N(2) + i) * PAGE, N(1) + i, N(3)
			};
			r[i] = (struct rfwin_revoke){ N(1) + i, N(3) };
		}
		if (ioctl(dev, issue ? RFWIN_ISSUE : RFWIN_REVOKE, &b))
			other = -1000 - errno;
		for (i = 0; i < n; i++)
			if (issue ? x[i].status : r[i].status)
				other = issue ? x[i].status : r[i].status;
			else
				ok++;
		free(x);
		free(r);
		sprintf(out, "ok %u other %d", ok, other);
	} else if (!strcmp(c, "dev-exec")) {
		void *p = mmap(0, PAGE, PROT_READ | PROT_EXEC, MAP_SHARED, dev,
			       RFWIN_PAGES_OFFSET);

		sprintf(out, "%s",
			p == MAP_FAILED ? strerror(errno) : "mapped");
	} else {
		return 0;
	}
	return 1;
}

static void run(char *line, char *out)
{
	words = 0;
	for (char *t = strtok(line, " \n"); t && words < 16;
	     t = strtok(0, " \n"))
		word[words++] = t;
	if (!words) {
		sprintf(out, "?");
	} else if (!strcmp(word[0], "query")) {
		struct gnttab_window_query q = {};
		long rc = call(GNTTABOP_window_query, &q, 1);

		sprintf(out, "rc %ld version %u entries %u windows %u", rc,
			q.version, q.max_entries, q.max_windows);
	} else if (!strcmp(word[0], "fuzz")) {
		/* PEER SEED [OPERATIONS], a bit for each */
		fuzz_peer = N(1), fuzz_operations = words > 3 ? N(3) : 63,
		fuzzing = 1;
		srand(N(2));
		start(fuzz);
		sprintf(out, "ok");
	} else if (!strcmp(word[0], "fuzz-has")) {
		fuzz_has(out);
	} else if (!strcmp(word[0], "fuzz-peer")) {	/* HANDLE,... */
		if (words > 1)
			fuzz_peer_has(word[1]);
		sprintf(out, "ok");
	} else if (!strcmp(word[0], "fuzzed")) {
		fuzzing = words < 2;
		sprintf(out,
			"calls %lu accepted %lu: query %lu create %lu "
			"register %lu issue %lu revoke %lu destroy %lu",
			fuzzed, accepted, accepted_of[0], accepted_of[1],
			accepted_of[2], accepted_of[3], accepted_of[4],
			accepted_of[5]);
	} else if (!granter(word[0], out) && !grantee(word[0], out) &&
		   !device(word[0], out)) {
		sprintf(out, "unknown command %s", word[0]);
	}
}

/*
 * Keeps our pages in their frames, whose numbers we tell the hypervisor without
 * the kernel's knowledge: they are not collapsed to huge pages, and locked
 * pages are not moved. Otherwise the hypervisor would write to what the kernel
 * put there next.
 */
static void keep_frames(void)
{
	int fd = open("/proc/sys/vm/compact_unevictable_allowed", O_WRONLY);

	if (prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
		perror("huge pages");
	if (fd < 0 || write(fd, "0", 1) != 1)
		perror("/proc/sys/vm/compact_unevictable_allowed");
	if (fd >= 0)
		close(fd);
}

static void serve(void)
{
	struct sigaction sa = { .sa_handler = on_signal,
				.sa_flags = SA_NODEFER };
	struct rlimit none = { RLIM_INFINITY, RLIM_INFINITY };
	int signals[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE };

	for (unsigned int i = 0; i < 4; i++)
		sigaction(signals[i], &sa, 0);
	setrlimit(RLIMIT_MEMLOCK, &none);
	keep_frames();
	own = pages(PAGES);
	mkfifo("/run/agent.in", 0600);
	mkfifo("/run/agent.out", 0600);
	for (;;) {
		char line[512], out[512] = "";
		FILE *f = fopen("/run/agent.in", "r");

		if (!f || !fgets(line, sizeof(line), f))
			line[0] = 0;
		if (f)
			fclose(f);
		run(line, out);
		f = fopen("/run/agent.out", "w");
		fprintf(f, "%s\n", out);
		fclose(f);
	}
}

struct domctl {
	uint32_t cmd, version;
	uint16_t domain, pad[3];
	union {
		struct {
			uint32_t op, mode;
			u64 bitmap, pages;
			uint32_t fault_count, dirty_count;
		} shadow;
		struct { uint32_t dev, flags, sbdf; } assign;
		char size[128];
	};
};

/* Makes a domctl in dom0 and prints the error. */
static int domctl(const struct domctl *wanted)
{
	struct domctl *d = pages(1);
	struct { u64 op, arg[5]; } c = { 36, { (u64)d } };
	int fd = open("/dev/xen/privcmd", O_RDWR), rc, version;

	/*
	 * Xen 4.17 has version 0x15 and refuses others with EACCES, as do its
	 * successors.
	 */
	for (version = 0x15; version < 0x20; version++) {
		*d = *wanted;
		d->version = version;
		rc = ioctl(fd, _IOC(_IOC_NONE, 'P', 0, sizeof(c)), &c);
		if (!rc || errno != EACCES)
			break;
	}
	printf("%s\n", rc ? strerror(errno) : "ok");
	return 0;
}

/*
 * Counts the seconds of the real-time clock, each of which is an interrupt that
 * no processor asked for.
 */
static int tick(const char *file)
{
	int fd = open("/dev/rtc0", O_RDONLY);
	unsigned long each, ticks = 0;

	if (fd < 0 || ioctl(fd, RTC_UIE_ON, 0)) {
		perror("/dev/rtc0");
		return 1;
	}
	while (read(fd, &each, sizeof(each)) > 0) {
		FILE *f = fopen(file, "w");

		if (!f)
			return 1;
		fprintf(f, "%lu\n", ++ticks);
		fclose(f);
	}
	return 1;
}

/* Registers of QEMU's device edu (docs/specs/edu.rst). */
#define EDU_SOURCE 0x80
#define EDU_TARGET 0x88
#define EDU_COUNT 0x90
#define EDU_COMMAND 0x98
#define EDU_BUFFER 0x40000ul
#define EDU_START 1u
#define EDU_TO_MEMORY 2u

static int dma(const char *file, int to_memory, u64 address)
{
	int fd = open(file, O_RDWR), i;
	volatile char *bar =
		mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	volatile u64 *command = (void *)(bar + EDU_COMMAND);

	if (bar == MAP_FAILED) {
		printf("%s\n", strerror(errno));
		return 1;
	}
	*(volatile u64 *)(bar + EDU_SOURCE) = to_memory ? EDU_BUFFER : address;
	*(volatile u64 *)(bar + EDU_TARGET) = to_memory ? address : EDU_BUFFER;
	*(volatile u64 *)(bar + EDU_COUNT) = 64;
	*command = EDU_START | (to_memory ? EDU_TO_MEMORY : 0);
	for (i = 0; i < 500 && (*command & EDU_START); i++)
		usleep(10000);
	printf("%s\n", *command & EDU_START ? "busy" : "done");
	return 0;
}

int main(int argc, char **argv)
{
	char line[512] = "";
	FILE *f;

	if (argc > 3 && !strcmp(argv[1], "log-dirty"))
		return domctl(&(struct domctl){ .cmd = 10,
						.domain = atoi(argv[2]),
						.shadow.op = atoi(argv[3]) });
	if (argc > 3 && !strcmp(argv[1], "assign"))
		return domctl(&(struct domctl){
			.cmd = 37,
			.domain = atoi(argv[2]),
			.assign.sbdf = strtoul(argv[3], 0, 0) });
	if (argc > 2 && !strcmp(argv[1], "tick"))
		return tick(argv[2]);
	if (argc > 4 && !strcmp(argv[1], "dma"))
		return dma(argv[2], !strcmp(argv[3], "write"),
			   strtoul(argv[4], 0, 0));

	if (argc > 1 && !strcmp(argv[1], "serve"))
		serve();
	for (int i = 1; i < argc; i++) {
		strncat(line, argv[i], sizeof(line) - strlen(line) - 2);
		strcat(line, " ");
	}
	f = fopen("/run/agent.in", "w");
	fprintf(f, "%s\n", line);
	fclose(f);
	f = fopen("/run/agent.out", "r");
	while (fgets(line, sizeof(line), f))
		fputs(line, stdout);
	fclose(f);
	return 0;
}
