//! Requests of a hypervisor: those that the shield carries out, and those that pass to the backend.

use std::os::fd::{AsFd, OwnedFd};

use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::numbers::usize_from;
use ringfence_wire::vhost_user::{self, Reply, Request, VringState, number};

use super::{Broken, Shield, by};
use crate::device::RequestAnswer;
use crate::proxy::end::{Outgoing, ProxyMessage};
use crate::proxy::table::{self, Decision, Length, Row};
use crate::proxy::{Party, ProxyFault};

impl Shield {
    /// Carries a message of the hypervisor out, and answers it. A message for which the backend is needed, and fails, is held.
    pub(super) fn handle(&mut self, message: ProxyMessage) -> Result<(), Broken> {
        let number = message.header.request;
        let refused = |fault: ProxyFault| by(Party::Frontend)(fault.into());
        let row = table::request(number).ok_or(refused(ProxyFault::Unknown { number }))?;
        tracing::debug!("vhost-user: {}, {} files", row.name, message.files.len());
        let is_passed = PASSED_REQUESTS.contains(&number);
        let request = Request::parse(number, &message.payload);
        let request = request.map_err(|fault| refused(fault.into()))?;
        if matches!(request, Request::Unknown(_)) && !is_passed {
            return Err(refused(ProxyFault::Refused { name: row.name, why: reason(row) }));
        }
        let at_backend = match is_passed {
            true => self.pass(row, &message.payload),
            false => self.stop_for(&request).map(|()| Answer::None),
        };
        let passed = match at_backend {
            Err(broken) if broken.party == Party::Backend => {
                self.held = Some(message);
                return Err(broken);
            }
            answer => answer?,
        };
        let sets_features = matches!(request, Request::SetFeatures(_));
        let answer = match is_passed {
            true => passed,
            false => {
                let answer = self.device.handle(request, message.files, self.epoll.as_fd());
                let answer = answer.map_err(|fault| by(Party::Frontend)(fault.into()))?;
                encode(number, answer)
            }
        };
        let acknowledges = message.header.needs_reply && self.device.acknowledges();
        self.send(match answer {
            Answer::None if acknowledges => Answer::Bytes(vhost_user::reply_word(number, 0)),
            answer => answer,
        });
        if sets_features {
            self.has_features = true;
            if let Some(connection) = &mut self.connection {
                let passed = connection.set_features(self.device.features());
                passed.map_err(by(Party::Backend))?;
            }
        }
        self.synchronise()
    }

    /// Sends an answer to the hypervisor, or keeps it until there is room.
    fn send(&mut self, answer: Answer) {
        let (bytes, files) = match answer {
            Answer::None => return,
            Answer::Bytes(bytes) => (bytes, Descriptors::default()),
            Answer::File(bytes, file) => (bytes, vec![file].into()),
        };
        if let Some(frontend) = &mut self.frontend {
            frontend.send(Outgoing::new(bytes.to_vec(), files));
            // A peer that has gone is found by the next look at its socket.
            let _ = frontend.flush();
        }
    }

    /// Passes a request to the backend that has no files, and concerns no memory.
    fn pass(&mut self, row: &'static Row, payload: &[u8]) -> Result<Answer, Broken> {
        let name = row.name;
        let refused = |fault: ProxyFault| by(Party::Frontend)(fault.into());
        if !self.device.speaks(row.feature) {
            return Err(refused(ProxyFault::Protocol { name }));
        }
        if matches!(row.length, Length::Exactly(len) if len != payload.len()) {
            return Err(refused(ProxyFault::Length { name, len: payload.len() }));
        }
        let failed = by(Party::Backend);
        let Some(connection) = &mut self.connection else { return Ok(Answer::None) };
        if [number::GET_CONFIG, table::SET_CONFIG].contains(&row.number) {
            // Both have the same fields.
            let parsed = Request::parse(number::GET_CONFIG, payload);
            parsed.map_err(|fault| refused(fault.into()))?;
        }
        if row.number != number::GET_CONFIG {
            connection.order(row.number, payload, None).map_err(failed)?;
            return Ok(Answer::None);
        }
        let mut answer = connection.ask(row.number, payload, payload.len()).map_err(failed)?;
        // The fields are those of the question, whatever the backend makes of them.
        let fields = answer.len().min(CONFIG_HEAD);
        answer[..fields].copy_from_slice(&payload[..fields]);
        Ok(Answer::Bytes(vhost_user::reply(row.number, &answer)))
    }

    /// Stops the vrings that a request stops.
    fn stop_for(&mut self, request: &Request) -> Result<(), Broken> {
        match request {
            Request::GetVringBase(VringState { index, .. })
            | Request::SetVringEnable(VringState { index, value: 0 }) => {
                self.stop(usize_from(*index))
            }
            Request::RemoveRegion(region) => {
                let vrings = self.device.vrings_in(region);
                vrings.into_iter().try_for_each(|number| self.stop(number))
            }
            Request::ResetOwner => {
                while let Some(number) = self.running.last() {
                    self.stop(*number)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Answer for the hypervisor.
enum Answer {
    /// None, or an acknowledgement on demand.
    None,
    Bytes(Reply),
    File(Reply, OwnedFd),
}

/// Encodes the answer of the device.
fn encode(number: u32, answer: RequestAnswer) -> Answer {
    match answer {
        RequestAnswer::Done => Answer::None,
        RequestAnswer::Word(word) => Answer::Bytes(vhost_user::reply_word(number, word)),
        RequestAnswer::State(state) => Answer::Bytes(vhost_user::reply_state(number, state)),
        RequestAnswer::Config(part, config) => {
            Answer::Bytes(vhost_user::reply_config(number, part, &config))
        }
        RequestAnswer::Inflight(area, file) => {
            Answer::File(vhost_user::reply_inflight(number, area), file)
        }
    }
}

/// Requests that pass to the backend.
const PASSED_REQUESTS: [u32; 4] =
    [number::GET_CONFIG, table::SET_CONFIG, table::SEND_RARP, table::NET_SET_MTU];

/// Bytes before the data of a part of the configuration space.
const CONFIG_HEAD: usize = 12;

/// Returns the reason for which a request is refused.
fn reason(row: &Row) -> &'static str {
    match row.decision {
        _ if row.number == table::SET_LOG_FD => {
            "nothing is told of a page beside its mark in the log"
        }
        Decision::Refuse(why) => why,
        Decision::Pass | Decision::Rule => "its feature was not offered",
    }
}
