//! Connection to the store that refuses some requests, for tests.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ringfence_platform::Platform;
use ringfence_platform::local::LocalPlatform;
use ringfence_wire::xenbus::{DeviceId, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient};

use crate::devices::AGAIN;
use crate::domain::{Control, DriverDomain};

/// Bytes of a message's header: type, request, transaction, length.
const HEADER: usize = 16;
/// Type of a request to write a key (`XS_WRITE` of xs_wire.h).
const WRITE: u32 = 11;
/// Type of a refusal (`XS_ERROR` of xs_wire.h).
const ERROR: u32 = 16;

/// End of the keys that cannot be written. `None` lets all requests pass.
type Refused = Arc<Mutex<Option<&'static str>>>;

/// Store whose refusals a test controls.
pub(crate) struct RefusingStore(Refused);

impl RefusingStore {
    /// Opens a connection of `platform` that refuses to write keys that end in `key`.
    pub(crate) fn connect(
        platform: &LocalPlatform,
        key: &'static str,
    ) -> (RefusingStore, StoreClient) {
        let server: UnixStream = platform.store_connection().unwrap().into();
        let (client, near) = UnixStream::pair().unwrap();
        let refused = Arc::new(Mutex::new(Some(key)));
        let to_client = Arc::new(Mutex::new(near.try_clone().unwrap()));
        let (requests, answers) = (Arc::clone(&refused), Arc::clone(&to_client));
        let from_server = server.try_clone().unwrap();
        std::thread::spawn(move || pass_requests(near, server, &requests, &answers));
        std::thread::spawn(move || pass_answers(from_server, &to_client));
        (RefusingStore(refused), StoreClient::new(OwnedFd::from(client)).unwrap())
    }

    /// Lets all requests pass from now on.
    pub(crate) fn recover(&self) {
        *self.0.lock().unwrap() = None;
    }
}

/// Reads a message. Returns `None` at the end of the connection.
fn message(from: &mut UnixStream) -> Option<Vec<u8>> {
    let mut message = vec![0; HEADER];
    from.read_exact(&mut message).ok()?;
    let length = u32::from_ne_bytes(message[12..].try_into().unwrap());
    message.resize(HEADER + usize::try_from(length).unwrap(), 0);
    from.read_exact(&mut message[HEADER..]).ok()?;
    Some(message)
}

fn pass_requests(
    mut client: UnixStream,
    mut server: UnixStream,
    refused: &Refused,
    answers: &Mutex<UnixStream>,
) {
    while let Some(request) = message(&mut client) {
        let is_write = request[..4] == WRITE.to_ne_bytes();
        let path = request[HEADER..].split(|byte| *byte == 0).next().unwrap();
        let key = *refused.lock().unwrap();
        if !is_write || key.is_none_or(|key| !path.ends_with(key.as_bytes())) {
            server.write_all(&request).unwrap();
            continue;
        }
        let why = b"ENOSPC\0";
        let mut answer = request[..HEADER].to_vec();
        answer[..4].copy_from_slice(&ERROR.to_ne_bytes());
        answer[12..].copy_from_slice(&u32::try_from(why.len()).unwrap().to_ne_bytes());
        answer.extend(why);
        answers.lock().unwrap().write_all(&answer).unwrap();
    }
    let _ = server.shutdown(std::net::Shutdown::Both);
}

fn pass_answers(mut server: UnixStream, client: &Mutex<UnixStream>) {
    let lock = || -> MutexGuard<'_, UnixStream> { client.lock().unwrap() };
    while let Some(answer) = message(&mut server) {
        if lock().write_all(&answer).is_err() {
            return;
        }
    }
}

/// Runs rounds until `until`.
pub(crate) fn run_until<D: DriverDomain<Error: std::fmt::Debug>>(
    control: &mut Control<LocalPlatform, D>,
    until: Instant,
) {
    while Instant::now() < until {
        control.wait(Some(until.min(Instant::now() + Duration::from_millis(10)))).unwrap();
        D::serve(control).unwrap();
        control.run_round().unwrap();
    }
}

/// Runs rounds until no event of the store is left, because each causes an attempt. Returns the time of the next attempt.
fn handle_late_events<D: DriverDomain<Error: std::fmt::Debug>>(
    control: &mut Control<LocalPlatform, D>,
    device: &DeviceId,
) -> Instant {
    loop {
        let again = control.devices.deadline();
        // The store sends the events of earlier changes before this answer.
        control.store.read(&format!("{}/state", device.backend_path())).unwrap();
        run_until(control, Instant::now() + Duration::from_millis(10));
        if let Some(time) = again.filter(|_| control.devices.deadline() == again) {
            return time;
        }
    }
}

/// Checks that a device whose keys cannot be written is tried again after the delay, and not before.
pub(crate) fn assert_retry<D: DriverDomain<Error: std::fmt::Debug>>(
    control: &mut Control<LocalPlatform, D>,
    refusing: &RefusingStore,
    device: &DeviceId,
) {
    let mut store = control.backends.platform.store().unwrap();
    let mut state = || {
        let state = store.read(&format!("{}/state", device.backend_path())).unwrap();
        XenbusState::parse(&state).unwrap()
    };
    let limit = Instant::now() + Duration::from_secs(60);
    while control.devices.deadline().is_none() {
        assert!(Instant::now() < limit, "it is to be tried again");
        run_until(control, Instant::now() + Duration::from_millis(10));
    }
    assert_eq!(state(), XenbusState::Initialising, "its keys cannot be written");
    let again = handle_late_events(control, device);
    assert!(again <= Instant::now() + AGAIN);
    refusing.recover();
    while state() == XenbusState::Initialising {
        assert!(Instant::now() < limit, "it is not tried again");
        run_until(control, Instant::now() + Duration::from_millis(10));
    }
    assert!(Instant::now() >= again, "the delay is not over");
    assert_eq!(state(), XenbusState::InitWait);
    assert_eq!(control.devices.deadline(), None);
}
