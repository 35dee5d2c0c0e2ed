//! Windows offered to the guest: payload for which the socket's send queue has room.
//!
//! The queue's limit is one of memory, and segments need more memory than their payload: twice as much where the other
//! end's window is 2 KiB. The share of payload is measured (`payload_share`) once it matters: in a small queue, and
//! after the socket has refused payload. A window never shrinks; payload that it covered and the socket refuses goes to
//! the backlog (`backlog`).
//!
//! Linux sends no segment longer than half of the largest window it has seen, and waits for its persist timer (200 ms
//! or more) if the window is shorter than a segment. The kernel of the host reports room when a third of the queue is
//! free. So a small queue offers at most two thirds at a time: a third is then always enough for a segment. If the
//! share has changed meanwhile, a timer looks at the room again.

use core::time::Duration;

use ringfence_offload::packet::tcp_flags::SYN;

use super::connection::TcpConnection;
use crate::context::Context;
use crate::host::{SendRoom, Socket};

/// Window size from which on a window that is mostly open is not computed again: several segments.
const WINDOW_IS_LARGE: u32 = 256 << 10;

/// Shares of payload in a queue's memory, in 256ths. In a large queue that has refused nothing: each 64 KiB need a
/// header of their own.
const SHARE_OF_LARGE: u32 = 248;
/// In a small queue before the first measurement, and the minimum of a measured share: segments of about 400 bytes. A few
/// typed characters in the queue have a lower share, by which the window for the bulk data behind them would be shorter than
/// a segment; no queue would then be full enough to be measured again.
const SHARE_OF_SMALL: u32 = 64;

/// Memory from which on the share is measured for the first time.
const MEASURED_FROM: u32 = 4096;

/// Time after which the room is looked at again for a guest whose window is shorter than a segment. It doubles with
/// each look, until the guest's own timer is due.
const CHECK_AFTER: Duration = Duration::from_millis(5);
/// Maximum of such looks in a row.
const CHECKS_MAX: u8 = 6;

/// Window that the guest knows, and measurements for the next one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Offer {
    /// Window size when it was last computed.
    pub(super) size: u32,
    /// Maximum of `size` so far.
    max: u32,
    /// Share of payload in the queue's memory, in 256ths; `None` before the first measurement.
    payload_share: Option<u8>,
    /// Time at which the room is looked at again.
    pub(super) check_at: Option<Duration>,
    /// Number of such looks in a row.
    checks: u8,
}

impl Offer {
    /// Records the payload in a queue. A quarter is left for shares that become lower later.
    fn measure(&mut self, payload: u32, memory: u32) {
        let share = u64::from(payload) * 256 / u64::from(memory.max(1));
        let share = u32::try_from(share - share / 4).unwrap_or(SHARE_OF_LARGE);
        self.payload_share = u8::try_from(share.clamp(SHARE_OF_SMALL, SHARE_OF_LARGE)).ok();
    }

    /// Returns the payload that fits into the free memory of a queue, for a guest with segments of `mss` bytes.
    fn payload(&self, room: SendRoom, mss: u32) -> u32 {
        let is_small = is_small(room, mss);
        let share = match self.payload_share {
            Some(share) => u32::from(share),
            None if is_small => SHARE_OF_SMALL,
            None => SHARE_OF_LARGE,
        };
        let (free, third) = (room.free() / 256 * share, room.limit / 3 / 256 * share);
        if third < mss { free.min(2 * third) } else { free }
    }

    /// Returns `true` if the guest needs no update of a window of which `open` bytes are left, which saves the system call:
    /// most of it is open, and either it is large or it was never larger. A request and its answer leave it so.
    fn is_mostly_open(&self, open: u32) -> bool {
        let is_most_of = |size: u32| open >= size / 4 * 3;
        let was_never_larger = self.max > 0 && is_most_of(self.max);
        open >= WINDOW_IS_LARGE && is_most_of(self.size) || was_never_larger
    }

    /// Returns the window that a guest with segments of `mss` bytes needs to send one.
    fn needed(&self, mss: u32) -> u32 {
        mss.min(self.max / 2)
    }
}

/// Returns `true` if a third of a queue holds no segment of `mss` bytes.
fn is_small(room: SendRoom, mss: u32) -> bool {
    room.limit / 3 < mss
}

/// Measures the share of payload in a queue of which `room` was just read. Without effect if the other end acknowledged
/// payload between the reads of memory and payload: the share of these would have no meaning.
fn measure(offer: &mut Offer, socket: &Socket, room: SendRoom, context: &mut Context<'_>) {
    let payload = context.host.unacknowledged(socket);
    if context.host.send_room(socket).used == room.used {
        offer.measure(payload, room.used);
    }
}

impl TcpConnection {
    /// Extends the offered window to the room in the socket's send queue; it never shrinks. Returns `true` if
    /// the window grew enough to announce it.
    pub(super) fn refresh_window(&mut self, context: &mut Context<'_>) -> bool {
        let is_closed = self.flags.guest_fin || self.backlog.is_some();
        if let Some(local) = self.local.as_ref().filter(|_| !is_closed) {
            let field = (local.room() >> self.rcv_scale).min(u16::MAX.into());
            let edge = self.rcv_nxt + (field << self.rcv_scale);
            let moves = edge > self.rcv_edge;
            self.rcv_edge = self.rcv_edge.max(edge);
            return moves;
        }
        let Some(socket) = self.socket.as_ref().filter(|_| !is_closed) else { return false };
        let open = self.rcv_edge.since(self.rcv_nxt).unwrap_or(0);
        if self.offer.is_mostly_open(open) && !self.flags.refused {
            return false;
        }
        let room = context.host.send_room(socket);
        let mss = u32::from(TcpConnection::mss_of(context.config.mtu, self.ends.to));
        if room.is_nearly_full() && !self.flags.awaiting_room {
            self.flags.awaiting_room = true;
            context.host.await_room(socket);
        }
        let is_measured = self.offer.payload_share.is_some();
        let is_due = if is_measured { room.is_nearly_full() } else { room.used >= MEASURED_FROM };
        if is_due && (is_measured || is_small(room, mss)) {
            measure(&mut self.offer, socket, room, context);
        }
        let free = self.offer.payload(room, mss).min(context.config.tcp.window_max);
        let gain = (self.rcv_nxt + free).since(self.rcv_edge).unwrap_or(0);
        let needed = self.offer.needed(mss);
        let unblocks = open < needed && free >= needed;
        if gain == 0 || gain < mss.min(free / 4) && !unblocks {
            self.check_later(open < needed, context.now);
            return false;
        }
        let scale = u32::from(self.rcv_scale);
        let field = (free >> scale).min(u16::MAX.into());
        let edge = self.rcv_nxt + (field << scale);
        let moves = edge > self.rcv_edge;
        self.rcv_edge = self.rcv_edge.max(edge);
        self.offer.size = self.rcv_edge.since(self.rcv_nxt).unwrap_or(0);
        self.offer.max = self.offer.max.max(self.offer.size);
        self.check_later(self.offer.size < self.offer.needed(mss), context.now);
        moves
    }

    /// Keeps the window of our SYN in force, before the guest has sent anything.
    pub(super) fn keep_window_of_syn(&mut self) {
        let limit = if self.rcv_scale == 0 { u16::MAX.into() } else { u32::MAX };
        self.offer.size = self.offer.size.min(limit);
        self.offer.max = self.offer.size;
        self.rcv_edge = self.rcv_nxt + self.offer.size;
    }

    /// Measures the share of payload in the queue of a socket that has refused some.
    pub(super) fn measure_full_queue(&mut self, context: &mut Context<'_>) {
        let Some(socket) = &self.socket else { return };
        let room = context.host.send_room(socket);
        measure(&mut self.offer, socket, room, context);
    }

    /// Sets or clears the timer of a guest that cannot send a segment, unless the socket reports room.
    fn check_later(&mut self, is_blocked: bool, now: Duration) {
        let offer = &mut self.offer;
        if !is_blocked {
            (offer.check_at, offer.checks) = (None, 0);
        } else if !self.flags.awaiting_room && offer.checks < CHECKS_MAX {
            let after = CHECK_AFTER * (1 << offer.checks);
            offer.check_at = offer.check_at.or(Some(now + after));
        }
    }

    /// Looks at the room again, at the time that `check_later` has set.
    pub(super) fn on_window_check(&mut self, context: &mut Context<'_>) {
        self.offer.check_at = None;
        self.offer.checks += 1;
        self.flags.ack_due |= self.refresh_window(context);
    }

    /// Returns the window field of a segment.
    pub(super) fn window_field(&self, flags: u8) -> u16 {
        let window = self.rcv_edge.since(self.rcv_nxt).unwrap_or(0);
        let scale = if flags & SYN != 0 { 0 } else { u32::from(self.rcv_scale) };
        // Rounded up: scaling must not shrink the offered window.
        u16::try_from(window.div_ceil(1 << scale)).unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Segment size of a guest with the MTU of the link.
    const MSS: u32 = 65_480;

    fn offer(measured: Option<(u32, u32)>) -> Offer {
        let mut offer = Offer::default();
        if let Some((payload, memory)) = measured {
            offer.measure(payload, memory);
        }
        offer
    }

    #[test]
    fn third_of_small_queue_is_enough_for_half_of_the_largest_window() {
        for (limit, measured) in [
            (4608, None),
            (46_080, None),
            (46_463, None),
            (46_080, Some((20_000, 46_000))),
            (87_040, Some((84_000, 87_000))),
            (300_000, Some((30_000, 300_000))),
        ] {
            let offer = offer(measured);
            let largest = offer.payload(SendRoom { used: 0, limit }, MSS);
            let used = limit - limit.div_ceil(3);
            let reported = offer.payload(SendRoom { used, limit }, MSS);
            assert!(reported > 0 && reported.max(MSS.min(largest / 2)) == reported, "{limit}");
        }
    }

    #[test]
    fn large_queue_is_offered_whole_until_payload_was_refused() {
        let room = SendRoom { used: 0, limit: 2 << 20 };
        assert_eq!(offer(None).payload(room, MSS), (2 << 20) / 256 * 248);
        // Three quarters of a half.
        assert_eq!(offer(Some((1 << 20, 2 << 20))).payload(room, MSS), (2 << 20) / 256 * 96);
    }

    #[test]
    fn window_behind_short_segments_holds_segments_again() {
        let offer = offer(Some((8, 30_000)));
        let window = offer.payload(SendRoom { used: 0, limit: 69_120 }, MSS);
        // The guest sends segments of half of the largest window that it was offered.
        assert!(window > 10_000, "{window}");
    }

    #[test]
    fn window_is_computed_again_once_a_quarter_of_the_largest_one_is_used() {
        let offer = Offer { size: 20_000, max: 20_000, ..Offer::default() };
        assert!(offer.is_mostly_open(15_000) && !offer.is_mostly_open(14_999));
        // A window that shrank with the room of its queue grows again.
        let offer = Offer { size: 5000, max: 20_000, ..Offer::default() };
        assert!(!offer.is_mostly_open(5000));
        let large = Offer { size: 300_000, max: 1 << 20, ..Offer::default() };
        assert!(large.is_mostly_open(300_000));
        assert!(!Offer::default().is_mostly_open(0), "never computed");
    }

    #[test]
    fn measured_share_stays_within_bounds() {
        for (payload, memory, share) in
            [(0, 0, 64), (0, 1000, 64), (9000, 1000, 248), (500, 1000, 96)]
        {
            assert_eq!(offer(Some((payload, memory))).payload_share, Some(share));
        }
    }
}
