//! Peer process in a second network namespace, and the commands that it executes.

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::UdpSocket;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::{again, ip, set_up, tcp};

/// Prefix of each response: the test harness writes to the same pipe.
const MARK: &str = "peer: ";

/// Maximum time that a peer waits for datagrams.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(60);

/// Handle of the peer process, which ends when the handle is dropped.
pub struct Peer {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    pub(super) fn start(name: &str) -> Peer {
        let mut command = again("-n", name, "peer");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        let orders = child.stdin.take();
        let mut peer = Peer { child, orders, answers };
        assert_eq!(peer.response(), "ready");
        peer
    }

    /// Returns the process id, by which `ip link set NAME netns` finds the namespace.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command, and waits for the response.
    pub fn call(&mut self, order: &str) -> String {
        self.send_command(order);
        self.response()
    }

    /// Sends a command without waiting.
    pub fn send_command(&mut self, order: &str) {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
    }

    /// Waits for the next response.
    pub fn response(&mut self) -> String {
        for line in &mut self.answers {
            let line = line.unwrap();
            if let Some((_, said)) = line.split_once(MARK) {
                return said.to_owned();
            }
        }
        panic!("the peer has ended");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The process ends with its standard input.
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

/// Executes commands until standard input ends: the main function of the peer process.
pub(super) fn execute() {
    respond("ready");
    let mut bound = None;
    for order in std::io::stdin().lines() {
        let order = order.unwrap();
        let (what, arguments) = order.split_once(' ').unwrap_or((&order, ""));
        match what {
            "ip" => {
                ip(arguments);
                respond("done");
            }
            "up" => {
                let words: Vec<&str> = arguments.split(' ').collect();
                set_up(words[0], words[1].parse().unwrap(), words[2].parse().unwrap());
                respond("done");
            }
            "serve" => {
                tcp::serve(|| respond("ended"));
                respond("done");
            }
            "bind" => {
                bound = Some(UdpSocket::bind(arguments).unwrap());
                respond("done");
            }
            "send" => respond(&send(arguments)),
            "receive" => respond(&receive(bound.as_ref().unwrap(), arguments.parse().unwrap())),
            _ => panic!("no order: {order}"),
        }
    }
}

fn respond(what: &str) {
    println!("{MARK}{what}");
    std::io::stdout().flush().unwrap();
}

/// Executes a send command: destination, number of sends, bytes of each, bytes of a datagram.
fn send(arguments: &str) -> String {
    let words: Vec<&str> = arguments.split(' ').collect();
    let [to, sends, each, size] = words[..] else { panic!("no order: send {arguments}") };
    let socket = socket_towards(to);
    send_segmented(&socket, sends.parse().unwrap(), each.parse().unwrap(), size.parse().unwrap())
}

/// Returns a connected UDP socket.
pub fn socket_towards(to: &str) -> UdpSocket {
    let any = if to.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(any).unwrap();
    socket.connect(to).unwrap();
    socket
}

/// Receives datagrams until `bytes` bytes have arrived; returns their number, bytes and hash.
pub fn receive(socket: &UdpSocket, bytes: usize) -> String {
    let (mut datagrams, mut got, mut hash) = (0, 0, Sha256::new());
    let mut buffer = vec![0; 1 << 16];
    let until = Instant::now() + RECEIVE_TIMEOUT;
    while got < bytes {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        socket.set_read_timeout(Some(left)).unwrap();
        let Ok(n) = socket.recv(&mut buffer) else { break };
        hash.update(&buffer[..n]);
        (datagrams, got) = (datagrams + 1, got + n);
    }
    summary(datagrams, got, hash)
}

/// Formats a summary of traffic: datagrams, bytes, hash.
pub fn summary(datagrams: usize, bytes: usize, hash: Sha256) -> String {
    format!("{datagrams} {bytes} {:x}", hash.finalize())
}

/// Sends `sends` times `each` bytes, which the kernel splits into datagrams of `size` bytes, with one call per
/// send; returns the summary.
pub fn send_segmented(socket: &UdpSocket, sends: usize, each: usize, size: u16) -> String {
    ringfence_sys::datagrams::segment_sent(socket, size).unwrap();
    let (mut datagrams, mut hash) = (0, Sha256::new());
    for n in 0..sends {
        let bytes = tcp::noise(n as u64 + 1, each);
        assert_eq!(socket.send(&bytes).unwrap(), each);
        hash.update(&bytes);
        datagrams += each.div_ceil(size.into());
    }
    summary(datagrams, sends * each, hash)
}
