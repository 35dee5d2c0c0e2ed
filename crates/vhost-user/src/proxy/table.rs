//! Table of the requests: their names, payloads, features, answers and decisions. The [module](super) has the reasons.

use ringfence_wire::vhost_user::{Header, protocol_feature as protocol};

use super::fault::ProxyFault;

/// Way of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Decision {
    /// Passes without its descriptors.
    Pass,
    /// The filter has a rule for it.
    Rule,
    /// Refused for this reason.
    Refuse(&'static str),
}

/// Answer to a request by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    /// None, or an acknowledgement on demand.
    None,
    /// Number of 64 bits.
    Word,
    /// State of a vring.
    State,
    /// Part of the configuration space.
    Config,
    /// Description of an in-flight log, with its file.
    Inflight,
}

/// Length of a payload in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Length {
    Exactly(usize),
    /// As the request's own fields say.
    Own,
}

/// Request of a frontend.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) number: u32,
    pub(crate) name: &'static str,
    pub(crate) length: Length,
    /// Protocol feature that must have been negotiated, or 0.
    pub(crate) feature: u64,
    pub(crate) answer: Answer,
    pub(crate) decision: Decision,
}

const fn row(number: u32, name: &'static str, len: usize, decision: Decision) -> Row {
    let length = Length::Exactly(len);
    Row { number, name, length, feature: 0, answer: Answer::None, decision }
}

const fn refused(number: u32, name: &'static str, why: &'static str) -> Row {
    row(number, name, 0, Decision::Refuse(why))
}

impl Row {
    const fn of(self, feature: u64) -> Row {
        Row { feature, ..self }
    }

    const fn answered(self, answer: Answer) -> Row {
        Row { answer, ..self }
    }

    const fn of_own_length(self) -> Row {
        Row { length: Length::Own, ..self }
    }
}

const LOG: &str = "all devices of a machine share the log of written pages";
const POSTCOPY: &str = "a userfaultfd reaches memory outside of the pool";
const STATE: &str = "a file for the state of a device could be any file";
const SESSION: &str = "sessions of cryptographic devices carry keys of the guest";

/// Requests of a frontend.
pub(crate) const REQUESTS: &[Row] = &{
    use Answer::{Config, Inflight, State, Word};
    use Decision::{Pass, Rule};
    [
        row(1, "GET_FEATURES", 0, Rule).answered(Word),
        row(2, "SET_FEATURES", 8, Rule),
        row(3, "SET_OWNER", 0, Pass),
        row(4, "RESET_OWNER", 0, Pass),
        row(5, "SET_MEM_TABLE", 0, Rule).of_own_length(),
        refused(6, "SET_LOG_BASE", LOG),
        refused(7, "SET_LOG_FD", LOG),
        row(8, "SET_VRING_NUM", 8, Pass),
        row(9, "SET_VRING_ADDR", 40, Rule),
        row(10, "SET_VRING_BASE", 8, Pass),
        row(11, "GET_VRING_BASE", 8, Pass).answered(State),
        row(12, "SET_VRING_KICK", 8, Rule),
        row(13, "SET_VRING_CALL", 8, Rule),
        row(14, "SET_VRING_ERR", 8, Rule),
        row(15, "GET_PROTOCOL_FEATURES", 0, Rule).answered(Word),
        row(16, "SET_PROTOCOL_FEATURES", 8, Rule),
        row(17, "GET_QUEUE_NUM", 0, Pass).answered(Word),
        row(18, "SET_VRING_ENABLE", 8, Pass),
        row(19, "SEND_RARP", 8, Pass).of(protocol::RARP),
        row(20, "NET_SET_MTU", 8, Pass).of(protocol::MTU),
        row(21, "SET_BACKEND_REQ_FD", 0, Rule).of(protocol::BACKEND_REQ),
        refused(22, "IOTLB_MSG", "without a vIOMMU there are no translations"),
        row(23, "SET_VRING_ENDIAN", 8, Pass).of(protocol::CROSS_ENDIAN),
        row(24, "GET_CONFIG", 0, Rule).of_own_length().of(protocol::CONFIG).answered(Config),
        row(25, "SET_CONFIG", 0, Rule).of_own_length().of(protocol::CONFIG),
        refused(26, "CREATE_CRYPTO_SESSION", SESSION),
        refused(27, "CLOSE_CRYPTO_SESSION", SESSION),
        refused(28, "POSTCOPY_ADVISE", POSTCOPY),
        refused(29, "POSTCOPY_LISTEN", POSTCOPY),
        refused(30, "POSTCOPY_END", POSTCOPY),
        row(31, "GET_INFLIGHT_FD", 0, Rule)
            .of_own_length()
            .of(protocol::INFLIGHT)
            .answered(Inflight),
        row(32, "SET_INFLIGHT_FD", 0, Rule).of_own_length().of(protocol::INFLIGHT),
        refused(33, "GPU_SET_SOCKET", "its socket carries memory of the display"),
        row(34, "RESET_DEVICE", 0, Pass).of(protocol::RESET_DEVICE),
        refused(35, "VRING_KICK", "kicks within the socket are not offered"),
        row(36, "GET_MAX_MEM_SLOTS", 0, Pass).of(protocol::CONFIGURE_MEM_SLOTS).answered(Word),
        row(37, "ADD_MEM_REG", 40, Rule).of(protocol::CONFIGURE_MEM_SLOTS),
        row(38, "REM_MEM_REG", 40, Rule).of(protocol::CONFIGURE_MEM_SLOTS),
        row(39, "SET_STATUS", 8, Pass).of(protocol::STATUS),
        row(40, "GET_STATUS", 0, Pass).of(protocol::STATUS).answered(Word),
        refused(41, "GET_SHARED_OBJECT", "an object belongs to another device"),
        refused(42, "SET_DEVICE_STATE_FD", STATE),
        refused(43, "CHECK_DEVICE_STATE", STATE),
        refused(44, "GET_SHMEM_CONFIG", "the machine would map memory of the backend"),
    ]
};

/// Returns the row of a request.
pub(crate) fn request(number: u32) -> Option<&'static Row> {
    REQUESTS.iter().find(|row| row.number == number)
}

/// Protocol features that a backend may have through the proxy: those of requests that pass.
pub(crate) const PASSED: u64 = {
    let mut features = protocol::MULTIQUEUE | protocol::REPLY_ACK;
    let mut at = 0;
    while at < REQUESTS.len() {
        features |= REQUESTS[at].feature;
        at += 1;
    }
    features
};

/// Numbers of requests that a backend of Ringfence does not know.
pub(crate) const SET_LOG_FD: u32 = 7;
pub(crate) const SEND_RARP: u32 = 19;
pub(crate) const NET_SET_MTU: u32 = 20;
pub(crate) const SET_CONFIG: u32 = 25;

/// Number of the one request that a backend may send: its configuration space has changed.
pub(crate) const CONFIG_CHANGE: u32 = 2;

/// Checks a request of a backend: only [`CONFIG_CHANGE`] passes, where its protocol feature was negotiated.
///
/// # Errors
///
/// Returns [`ProxyFault::Channel`] for any other.
pub(crate) fn check_channel_request(header: Header, has_config: bool) -> Result<(), ProxyFault> {
    let Header { request: number, len, .. } = header;
    if number == CONFIG_CHANGE && has_config && len == 0 {
        return Ok(());
    }
    Err(ProxyFault::Channel { number, name: channel_name(number) })
}

/// Returns the name of a request of a backend.
fn channel_name(number: u32) -> Option<&'static str> {
    Some(match number {
        1 => "IOTLB_MSG",
        CONFIG_CHANGE => "CONFIG_CHANGE_MSG",
        3 => "VRING_HOST_NOTIFIER_MSG",
        4 => "VRING_CALL",
        5 => "VRING_ERR",
        6 => "SHARED_OBJECT_ADD",
        7 => "SHARED_OBJECT_REMOVE",
        8 => "SHARED_OBJECT_LOOKUP",
        9 => "SHMEM_MAP",
        10 => "SHMEM_UNMAP",
        _ => return None,
    })
}
