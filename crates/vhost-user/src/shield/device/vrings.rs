//! Vrings of a shield: they start, stop and continue at a backend.

// #syscall shield epoll_ctl: calls of a backend

use std::time::Instant;

use rustix::event::epoll::{self, EventFlags};

use super::{Broken, CALLS, Shield, ShieldVring, VRINGS_MAX, by, of_vrings};
use crate::device::Parts;
use crate::proxy::Party;
use crate::shield::connection::{ANSWER_MAX, Calls, Connection, Events};
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
        self.drain(number)?;
        let Some(connection) = &mut self.connection else { return Ok(()) };
        connection.stop(index_of(number)).map_err(by(Party::Backend))?;
        self.running.retain(|running| *running != number);
        let Some(ShieldVring { shadow, events }) = self.vrings[number].take() else {
            return Ok(());
        };
        // The backend holds the file as well, so closing it does not suffice.
        let _ = epoll::delete(&self.epoll, &events.call);
        let Parts { vrings, signal, dirty, .. } = self.device.parts();
        let front = &mut vrings[number];
        shadow.stop(front.queue.as_mut(), &mut connection.pool, dirty).map_err(of_vrings)?;
        front.publish(signal);
        front.mark_used(dirty).map_err(|fault| of_vrings(fault.into()))
    }

    /// Waits until the backend has used all chains that it has, of a vring with a log of chains in flight: a machine that
    /// migrates leaves that log behind. Receive buffers of a network card have no such log, and no end.
    fn drain(&mut self, number: usize) -> Result<(), Broken> {
        let Shield { device, connection, vrings, .. } = self;
        let Parts { vrings: fronts, signal, dirty, .. } = device.parts();
        let front = &mut fronts[number];
        let (Some(connection), Some(vring)) = (connection, &mut vrings[number]) else {
            return Ok(());
        };
        if !dirty.is_on() {
            return Ok(());
        }
        let calls = Calls::new(&vring.events).map_err(by(Party::Backend))?;
        let deadline = Instant::now() + ANSWER_MAX;
        while let Some(queue) = front.queue.as_mut().filter(|queue| queue.has_log()) {
            if !vring.shadow.is_at_backend() {
                break;
            }
            let pool = &mut connection.pool;
            let worked = vring.shadow.complete(queue, pool, dirty).map_err(of_vrings)?;
            front.publish(signal);
            if !worked && !vring.shadow.await_call().map_err(of_vrings)? {
                let waited = connection.wait_call(&calls, deadline);
                waited.map_err(by(Party::Backend))?;
            }
        }
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
