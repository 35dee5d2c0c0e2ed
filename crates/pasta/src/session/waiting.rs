//! Waits of a session: for the next event, and for the last data of a guest that has ended.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use ringfence_hostnet::file_watch::FileWatch;
use ringfence_sandbox::spawn::Event;
use ringfence_sys::poll::wait_any;
use ringfence_uplink::runner::DRAIN_MAX;
use ringfence_uplink_process::FromUplink;
use ringfence_uplink_process::multicast::Memberships;
use ringfence_uplink_process::orders::UplinkOrder;

use super::{CHECK_INTERVAL, Session};
use crate::api::PortServer;
use crate::auto::Auto;
use crate::live_policy::LivePolicy;
use crate::target::Watch;

/// Maximum time that the uplink may need for its answer, beyond that of a drain.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

impl Session {
    /// Waits for the next event, or a time at which something is due.
    pub(super) fn sleep(&self) -> anyhow::Result<()> {
        let mut fds = vec![
            PollFd::new(&self.signals, PollFlags::IN),
            PollFd::from_borrowed_fd(self.uplink.events(), PollFlags::IN),
            PollFd::new(self.uplink.channel(), PollFlags::IN),
        ];
        fds.extend(self.command.iter().map(|(_, channel)| PollFd::new(channel, PollFlags::IN)));
        fds.extend(self.stop.iter().map(|fd| PollFd::new(fd, PollFlags::empty())));
        fds.extend(self.status.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let live_policy = self.live_policy.iter().flat_map(LivePolicy::fds);
        let asked = live_policy.chain(self.questions.fds());
        fds.extend(asked.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let greeting = self.greeting.iter().map(|greeting| &greeting.socket);
        fds.extend(greeting.map(|socket| PollFd::new(socket, PollFlags::IN)));
        let name_servers = self.name_servers.as_ref().map(FileWatch::fd);
        fds.extend(name_servers.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let watched = self.watch.as_ref().map(Watch::fd);
        fds.extend(watched.flatten().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let memberships = self.network.memberships.as_ref();
        fds.extend(memberships.map(|own| PollFd::new(own, PollFlags::IN)));
        // A file may vanish without an event, on an overlay file system for instance.
        let is_file = matches!(self.watch, Some(Watch::File { .. }));
        let check = is_file.then(|| Instant::now() + CHECK_INTERVAL);
        let port_server = self.port_server.iter().flat_map(PortServer::fds);
        fds.extend(port_server.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let server = self.port_server.as_ref().and_then(PortServer::deadline);
        let auto = self.auto.as_ref().map(Auto::deadline);
        let rejoins = memberships.and_then(Memberships::deadline);
        let status = self.status.deadline();
        let asked = self.questions.deadline();
        let deadline = [check, server, auto, rejoins, status, asked].into_iter().flatten().min();
        wait_any(&mut fds, deadline)?;
        Ok(())
    }

    /// Waits until the uplink has carried the last data of a guest that has ended: packets in its interface, and data of its
    /// TCP connections that the other ends have yet to take. A signal ends the wait.
    pub(super) fn carry_last_data(&mut self) {
        if self.uplink.channel().send_now(&UplinkOrder::Drain, &[]).is_err() {
            return;
        }
        let until = Instant::now() + DRAIN_MAX + ANSWER_WITHIN;
        while Instant::now() < until && !matches!(self.signals.next(), Ok(Some(_))) {
            let channel = self.uplink.channel();
            match self.egress.take(|| self.ports.try_receive(channel)) {
                Some(FromUplink::Drained | FromUplink::Failed(_)) => return,
                Some(_) => continue,
                None => {}
            }
            match self.uplink.next_event() {
                Some(Event::Ended(_)) => return,
                Some(Event::Stderr(_)) => continue,
                None => {}
            }
            let mut fds = [
                PollFd::new(&self.signals, PollFlags::IN),
                PollFd::from_borrowed_fd(self.uplink.events(), PollFlags::IN),
                PollFd::new(self.uplink.channel(), PollFlags::IN),
            ];
            if wait_any(&mut fds, Some(until)).is_err() {
                return;
            }
        }
    }
}
