//! Vrings of a shield: they start, stop and continue at a backend.

// #syscall shield epoll_ctl: calls of a backend

use rustix::event::epoll::{self, EventFlags};

use super::{Broken, CALLS, Shield, ShieldVring, VRINGS_MAX, by, of_vrings};
use crate::proxy::Party;
use crate::shield::connection::{Connection, Events};
use crate::shield::fault::ShieldFault;
use crate::shield::shadow::{ShadowQueue, ShadowShape};

impl Shield {
    /// Starts each vring at the backend that runs here, and stops each that does not.
    pub(super) fn synchronise(&mut self) -> Result<(), Broken> {
        for number in 0..VRINGS_MAX {
            match (&self.device.vrings[number].queue, &self.vrings[number]) {
                (Some(_), None) => self.start(number)?,
                (None, Some(_)) => self.stop(number)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Starts a vring at the backend.
    fn start(&mut self, number: usize) -> Result<(), Broken> {
        let size = self.device.vrings[number].queue.as_ref().map_or(0, |queue| queue.size());
        let Some(connection) = &mut self.connection else { return Ok(()) };
        let shape = shape(connection, number, size);
        let shadow = ShadowQueue::new(&mut connection.pool, shape).map_err(of_vrings)?;
        let events = Events::new().map_err(by(Party::Backend))?;
        self.vrings[number] = Some(ShieldVring { shadow, events });
        self.running.push(number);
        self.start_at_backend(number)
    }

    /// Starts a vring at another backend.
    pub(super) fn resume(&mut self, number: usize) -> Result<(), Broken> {
        let (Some(connection), Some(vring)) = (&mut self.connection, &mut self.vrings[number])
        else {
            return Ok(());
        };
        let shape = shape(connection, number, vring.shadow.size());
        vring.shadow.move_to(&mut connection.pool, shape).map_err(of_vrings)?;
        vring.events = Events::new().map_err(by(Party::Backend))?;
        self.start_at_backend(number)
    }

    fn start_at_backend(&mut self, number: usize) -> Result<(), Broken> {
        let (Some(connection), Some(vring)) = (&mut self.connection, &self.vrings[number]) else {
            return Ok(());
        };
        let failed = by(Party::Backend);
        let index = index_of(number);
        let data = epoll::EventData::new_u64(CALLS + u64::from(index));
        // Each call is an edge, so the counter is never read.
        let events = EventFlags::IN | EventFlags::ET;
        let watched = epoll::add(&self.epoll, &vring.events.call, data, events);
        watched.map_err(|errno| {
            failed(ShieldFault::System { what: "waiting for calls", source: errno.into() })
        })?;
        connection.start(index, &vring.shadow, &vring.events).map_err(failed)
    }

    /// Stops a vring at the backend, and returns its chains.
    pub(super) fn stop(&mut self, number: usize) -> Result<(), Broken> {
        if !self.vrings.get(number).is_some_and(Option::is_some) {
            return Ok(());
        }
        let Some(connection) = &mut self.connection else { return Ok(()) };
        connection.stop(index_of(number)).map_err(by(Party::Backend))?;
        self.running.retain(|running| *running != number);
        let Some(ShieldVring { shadow, events }) = self.vrings[number].take() else {
            return Ok(());
        };
        // The backend holds the file as well, so closing it does not suffice.
        let _ = epoll::delete(&self.epoll, &events.call);
        let (_, fronts, signal) = self.device.parts();
        let front = &mut fronts[number];
        shadow.stop(front.queue.as_mut(), &mut connection.pool).map_err(of_vrings)?;
        front.publish(signal);
        Ok(())
    }
}

fn shape(connection: &Connection, number: usize, size: u16) -> ShadowShape {
    let features = connection.vring_features();
    let vrings = 2 * usize::from(connection.queues);
    ShadowShape { index: index_of(number), size, features, vrings }
}

/// Returns the number of a vring for a message.
fn index_of(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
