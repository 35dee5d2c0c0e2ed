// SPDX-License-Identifier: GPL-2.0-only
/*
 * Control ring: sends one message at a time and waits for its response.
 *
 * A message that is not answered in time ends the use of the ring until the next connection, so no
 * late response is taken for that of another message. Staged pages stay in use then; the backend
 * drops them when the device closes.
 */
#include <linux/interrupt.h>
#include "netfront.h"

/* A backend that restarts answers after it has taken the device over. */
#define RFN_CTRL_TIMEOUT (15 * HZ)

static bool rfn_ctrl_answered(const struct rfn_ctrl *ctrl)
{
	return READ_ONCE(ctrl->ring.sring->rsp_prod) != ctrl->ring.rsp_cons;
}

static irqreturn_t rfn_ctrl_interrupt(int irq, void *data)
{
	struct rfn_ctrl *ctrl = data;
	bool work = rfn_ctrl_answered(ctrl);

	wake_up_all(&ctrl->wait);
	xen_irq_lateeoi(irq, work ? 0 : XEN_EOI_FLAG_SPURIOUS);
	return IRQ_HANDLED;
}

/* Creates ring, list page and event channel. The ring is usable once the backend is Connected. */
int rfn_ctrl_create(struct rfn_dev *rd)
{
	struct rfn_ctrl *ctrl = &rd->ctrl;
	struct xen_netif_ctrl_sring *sring;
	int err;

	err = rfn_page_alloc(&ctrl->ring_page, rd->xdev->otherend_id, false);
	if (err)
		return err;
	err = rfn_page_alloc(&ctrl->list, rd->xdev->otherend_id, false);
	if (err)
		goto fail;
	sring = ctrl->ring_page.va;
	SHARED_RING_INIT(sring);
	FRONT_RING_INIT(&ctrl->ring, sring, XEN_PAGE_SIZE);
	err = xenbus_alloc_evtchn(rd->xdev, &ctrl->port);
	if (err)
		goto fail;
	err = bind_evtchn_to_irqhandler_lateeoi(ctrl->port, rfn_ctrl_interrupt, 0, RFN_NAME "-ctrl",
						ctrl);
	if (err < 0) {
		xenbus_free_evtchn(rd->xdev, ctrl->port);
		goto fail;
	}
	ctrl->irq = err;
	WRITE_ONCE(ctrl->dead, false);
	ctrl->usable = true;
	return 0;
fail:
	rfn_page_free(rd, &ctrl->list);
	rfn_page_free(rd, &ctrl->ring_page);
	return err;
}

/* Ends a wait for a response, and refuses further messages. Needs no lock. */
void rfn_ctrl_kill(struct rfn_dev *rd)
{
	WRITE_ONCE(rd->ctrl.dead, true);
	wake_up_all(&rd->ctrl.wait);
}

void rfn_ctrl_destroy(struct rfn_dev *rd)
{
	struct rfn_ctrl *ctrl = &rd->ctrl;

	rfn_ctrl_kill(rd);
	mutex_lock(&ctrl->lock);
	ctrl->usable = false;
	if (ctrl->irq) {
		unbind_from_irqhandler(ctrl->irq, ctrl);
		ctrl->irq = 0;
		rfn_page_free(rd, &ctrl->list);
		rfn_page_free(rd, &ctrl->ring_page);
	}
	mutex_unlock(&ctrl->lock);
}

static int rfn_ctrl_status(u32 status)
{
	switch (status) {
	case XEN_NETIF_CTRL_STATUS_SUCCESS:
		return 0;
	case XEN_NETIF_CTRL_STATUS_NOT_SUPPORTED:
		return -EOPNOTSUPP;
	case XEN_NETIF_CTRL_STATUS_BUFFER_OVERFLOW:
		return -ENOSPC;
	default:
		return -EINVAL;
	}
}

/*
 * Sends a message and waits for its response. Called with ctrl.lock held, which also guards the
 * list page.
 */
int rfn_ctrl_message(struct rfn_dev *rd, u16 type, u32 data0, u32 data1, u32 data2, u32 *answer)
{
	struct rfn_ctrl *ctrl = &rd->ctrl;
	struct xen_netif_ctrl_request request = {
		.id = ctrl->next_id,
		.type = type,
		.data = { data0, data1, data2 },
	};
	struct xen_netif_ctrl_response response;
	int notify;
	u32 prod;

	lockdep_assert_held(&ctrl->lock);
	if (!ctrl->usable || READ_ONCE(ctrl->dead))
		return -ENODEV;
	ctrl->next_id++;
	memcpy(RING_GET_REQUEST(&ctrl->ring, ctrl->ring.req_prod_pvt), &request, sizeof(request));
	ctrl->ring.req_prod_pvt++;
	ctrl->ring.sring->rsp_event = ctrl->ring.rsp_cons + 1;
	RING_PUSH_REQUESTS_AND_CHECK_NOTIFY(&ctrl->ring, notify);
	if (notify)
		notify_remote_via_irq(ctrl->irq);
	wait_event_timeout(ctrl->wait, READ_ONCE(ctrl->dead) || rfn_ctrl_answered(ctrl),
			   RFN_CTRL_TIMEOUT);
	prod = READ_ONCE(ctrl->ring.sring->rsp_prod);
	/* Reads the response after the producer index. */
	virt_rmb();
	if (prod == ctrl->ring.rsp_cons) {
		ctrl->usable = false;
		if (READ_ONCE(ctrl->dead))
			return -ENODEV;
		rfn_count(rd, RFN_EV_CTRL_TIMEOUTS);
		netdev_warn(rd->ndev,
			    "the backend did not answer control message %u; the control ring is unused now\n",
			    type);
		return -ETIMEDOUT;
	}
	RING_COPY_RESPONSE(&ctrl->ring, ctrl->ring.rsp_cons, &response);
	if (prod - ctrl->ring.rsp_cons != 1 || response.id != request.id || response.type != type) {
		ctrl->usable = false;
		rfn_fault(rd, 0, "a control response to no message");
		return -EPROTO;
	}
	ctrl->ring.rsp_cons++;
	if (answer)
		*answer = response.data;
	return rfn_ctrl_status(response.status);
}
