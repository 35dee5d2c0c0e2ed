//! A process in a second network namespace, and the words by which it is told what to do.

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::UdpSocket;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};
use sha2::{Digest, Sha256};

use super::{again, ip, set_up, tcp};

/// Before each answer: the test harness writes to the same pipe.
const MARK: &str = "peer: ";

/// How long a peer waits for datagrams.
const PATIENCE: Duration = Duration::from_secs(60);

/// The process, from outside. It ends when this is dropped.
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
        assert_eq!(peer.answer(), "ready");
        peer
    }

    /// Its process, by whose number `ip link set NAME netns` finds the namespace.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Tells it to do something, and waits for what it says of it.
    pub fn tell(&mut self, order: &str) -> String {
        self.ask(order);
        self.answer()
    }

    /// Tells it to do something.
    pub fn ask(&mut self, order: &str) {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
    }

    /// What it says next.
    pub fn answer(&mut self) -> String {
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
        // Its standard input ends, and so does it.
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

/// The process itself: does as it is told until nobody is left to tell it.
pub(super) fn execute() {
    say("ready");
    let mut bound = None;
    for order in std::io::stdin().lines() {
        let order = order.unwrap();
        let (what, arguments) = order.split_once(' ').unwrap_or((&order, ""));
        match what {
            "ip" => {
                ip(arguments);
                say("done");
            }
            "up" => {
                let words: Vec<&str> = arguments.split(' ').collect();
                set_up(words[0], words[1].parse().unwrap(), words[2].parse().unwrap());
                say("done");
            }
            "serve" => {
                tcp::serve(|| say("ended"));
                say("done");
            }
            "bind" => {
                bound = Some(UdpSocket::bind(arguments).unwrap());
                say("done");
            }
            "send" => say(&send(arguments)),
            "receive" => say(&receive(bound.as_ref().unwrap(), arguments.parse().unwrap())),
            _ => panic!("no order: {order}"),
        }
    }
}

fn say(what: &str) {
    println!("{MARK}{what}");
    std::io::stdout().flush().unwrap();
}

/// Where to, how many sends, bytes of each, bytes of a datagram.
fn send(arguments: &str) -> String {
    let words: Vec<&str> = arguments.split(' ').collect();
    let [to, sends, each, size] = words[..] else { panic!("no order: send {arguments}") };
    let socket = socket_towards(to);
    send_segmented(&socket, sends.parse().unwrap(), each.parse().unwrap(), size.parse().unwrap())
}

/// A UDP socket that is connected.
pub fn socket_towards(to: &str) -> UdpSocket {
    let any = if to.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(any).unwrap();
    socket.connect(to).unwrap();
    socket
}

/// Takes datagrams until there are `bytes` of them: how many, bytes, hash.
pub fn receive(socket: &UdpSocket, bytes: usize) -> String {
    let (mut datagrams, mut got, mut hash) = (0, 0, Sha256::new());
    let mut buffer = vec![0; 1 << 16];
    let until = Instant::now() + PATIENCE;
    while got < bytes {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        socket.set_read_timeout(Some(left)).unwrap();
        let Ok(n) = socket.recv(&mut buffer) else { break };
        hash.update(&buffer[..n]);
        (datagrams, got) = (datagrams + 1, got + n);
    }
    described(datagrams, got, hash)
}

/// How the traffic of a test is told: datagrams, bytes, hash.
pub fn described(datagrams: usize, bytes: usize, hash: Sha256) -> String {
    format!("{datagrams} {bytes} {:x}", hash.finalize())
}

/// Sends `sends` times `each` bytes that the kernel is to make datagrams of `size` of, as few calls as
/// sends; how that is told.
pub fn send_segmented(socket: &UdpSocket, sends: usize, each: usize, size: u16) -> String {
    setsockopt(socket, sockopt::UdpGsoSegment, &size.into()).unwrap();
    let (mut datagrams, mut hash) = (0, Sha256::new());
    for n in 0..sends {
        let bytes = tcp::noise(n as u64 + 1, each);
        assert_eq!(socket.send(&bytes).unwrap(), each);
        hash.update(&bytes);
        datagrams += each.div_ceil(size.into());
    }
    described(datagrams, sends * each, hash)
}
