// SPDX-License-Identifier: GPL-2.0-only
/*
 * /dev/ringfence-window: files, permissions, and the calls to the hypervisor that both roles make.
 */
#include <linux/capability.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <xen/xen.h>
#include "window.h"

static long query(void __user *arg)
{
	struct gnttab_window_query op = {};
	int rc = grant_window_query(&op);

	BUILD_BUG_ON(sizeof(op) != sizeof(struct rfwin_query));
	if (rc)
		return rc;
	return copy_to_user(arg, &op, sizeof(op)) ? -EFAULT : 0;
}

static long window_ioctl(struct file *file, unsigned int cmd, unsigned long arg)
{
	struct window *w = file->private_data;
	void __user *p = (void __user *)arg;
	long rc;

	if (mutex_lock_killable(&w->lock))
		return -EINTR;
	switch (cmd) {
	case RFWIN_QUERY:
		rc = query(p);
		break;
	case RFWIN_CREATE:
		rc = w->role == NONE ? granter_create(w, p) : -EBUSY;
		break;
	case RFWIN_REGISTER:
		rc = w->role == NONE ? grantee_register(w, p) : -EBUSY;
		break;
	case RFWIN_ISSUE:
		rc = w->role == GRANTER ? granter_issue(w, p) : -EINVAL;
		break;
	case RFWIN_REVOKE:
		rc = w->role == GRANTER ? granter_revoke(w, p) : -EINVAL;
		break;
	default:
		rc = -ENOTTY;
	}
	mutex_unlock(&w->lock);
	return rc;
}

/*
 * No w->lock here: mmap holds the mm's lock, which an issue takes inside of w->lock. The role is
 * set last.
 */
static int window_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct window *w = file->private_data;

	/* Pairs with the registration, which sets range and table before the role. */
	return smp_load_acquire(&w->role) == GRANTEE ? grantee_mmap(w, vma) : -EINVAL;
}

static int window_open(struct inode *inode, struct file *file)
{
	struct window *w = kzalloc(sizeof(*w), GFP_KERNEL_ACCOUNT);

	if (!w)
		return -ENOMEM;
	mutex_init(&w->lock);
	file->private_data = w;
	return nonseekable_open(inode, file);
}

/* Mappings hold the file: none is left here. */
static int window_release(struct inode *inode, struct file *file)
{
	struct window *w = file->private_data;

	if (w->role == GRANTER)
		granter_release(w);
	else if (w->role == GRANTEE)
		grantee_release(w);
	kfree(w);
	return 0;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.open = window_open,
	.release = window_release,
	.unlocked_ioctl = window_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = window_mmap,
	.llseek = noop_llseek,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "ringfence-window",
	.fops = &operations,
	.mode = 0600,
};

static int __init window_init(void)
{
	struct gnttab_window_query op = {};
	int rc;

	if (!xen_domain())
		return -ENODEV;
	rc = grant_window_query(&op);
	if (rc) {
		pr_info("ringfence-window: this Xen has no grant windows (%d)\n", rc);
		return -ENODEV;
	}
	if (op.version != GNTWIN_VERSION) {
		pr_info("ringfence-window: Xen has grant windows of version %u, this module knows %u\n",
			op.version, GNTWIN_VERSION);
		return -ENODEV;
	}
	rc = pool_init();
	if (rc)
		return rc;
	rc = misc_register(&device);
	if (rc)
		pool_exit();
	return rc;
}

static void __exit window_exit(void)
{
	misc_deregister(&device);
	pool_exit();
}

module_init(window_init);
module_exit(window_exit);
MODULE_DESCRIPTION("Grant windows of Xen for user space");
MODULE_AUTHOR("Ringfence developers");
MODULE_LICENSE("GPL");
