// SPDX-License-Identifier: GPL-2.0-only
/* Counters of each pool: a file in /sys/kernel/debug/ringfence-lent-pool with its PCI address. */
#include <linux/debugfs.h>
#include <linux/seq_file.h>
#include "lent-pool.h"

static const char *const names[RLP_COUNTERS] = {
	[RLP_MAPS_TO] = "maps_to_device",
	[RLP_MAPS_FROM] = "maps_from_device",
	[RLP_BYTES_TO] = "bytes_to_device",
	[RLP_BYTES_FROM] = "bytes_from_device",
	[RLP_FULL_TO] = "full_to_device",
	[RLP_FULL_FROM] = "full_from_device",
	[RLP_TOO_LONG] = "too_long",
	[RLP_BAD_UNMAP] = "bad_unmaps",
	[RLP_COHERENT] = "coherent_bytes",
	[RLP_ZEROED] = "zeroed_bytes",
};

static struct dentry *root;

static int counters_show(struct seq_file *file, void *unused)
{
	struct rlp_pool *pool = file->private;
	int i, cpu;

	for (i = 0; i < RLP_COUNTERS; i++) {
		u64 sum = 0;

		for_each_possible_cpu(cpu)
			sum += per_cpu_ptr(pool->counters, cpu)->count[i];
		seq_printf(file, "%20s: %llu\n", names[i], sum);
	}
	seq_printf(file, "%20s: %u\n", "devices", READ_ONCE(pool->users));
	for (i = 0; i < RLP_CLASSES; i++) {
		struct rlp_class *class = &pool->class[i];

		seq_printf(file, "%9s%5lu KiB: %u of %u slots used, %u to device, %u from device\n",
			   "", 1UL << class->shift >> 10, class->slots - READ_ONCE(class->top),
			   class->slots, READ_ONCE(class->busy[RLP_TO_DEVICE]),
			   READ_ONCE(class->busy[RLP_FROM_DEVICE]));
	}
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(counters);

void rlp_stats_add(struct rlp_pool *pool)
{
	pool->file = debugfs_create_file(pci_name(pool->pdev), 0400, root, pool, &counters_fops);
}

void rlp_stats_remove(struct rlp_pool *pool)
{
	debugfs_remove(pool->file);
}

void rlp_stats_init(void)
{
	root = debugfs_create_dir(RLP_NAME, NULL);
}

void rlp_stats_exit(void)
{
	debugfs_remove_recursive(root);
}
