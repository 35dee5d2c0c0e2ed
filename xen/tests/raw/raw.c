// SPDX-License-Identifier: GPL-2.0-only
/*
 * Test module: /dev/window-raw makes grant table operations with arguments as
 * they come from user space, among them those that an honest driver never
 * makes. For test guests only.
 */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <asm/xen/hypercall.h>
#include <xen/page.h>

struct call {
	u64 cmd, arg, count;
};

static long raw_ioctl(struct file *file, unsigned int nr, unsigned long arg)
{
	struct call c;
	long rc;

	/* Number of a guest frame as Xen takes it. */
	if (nr == 0x7702)
		return pfn_to_gfn(arg);
	/* Number of the calling process's top page table. */
	if (nr == 0x7703)
		return pfn_to_gfn(virt_to_pfn(current->mm->pgd));
	if (copy_from_user(&c, (void __user *)arg, sizeof(c)))
		return -EFAULT;
	stac();
	rc = HYPERVISOR_grant_table_op(c.cmd, (void *)c.arg, c.count);
	clac();
	return rc;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = raw_ioctl,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "window-raw",
	.fops = &operations,
};
module_misc_device(device);
MODULE_DESCRIPTION("Grant table operations with any argument, for tests");
MODULE_LICENSE("GPL");
