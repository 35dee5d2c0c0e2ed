//! TCP connections, opened and closed.
//!
//! The server closes first, so that the state that TCP keeps of a closed connection (TIME-WAIT, RFC
//! 9293, section 3.6) is the server's, which a new connection of the same four numbers replaces:
//! else the client would be out of ports for a minute after the first 28 000.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Instant;

use anyhow::Context as _;

use super::series::{Series, judge};
use super::stage::Stage;

const PORT: u16 = 7000;
/// Threads of the server, and of the client.
const THREADS: u32 = 4;
/// How many samples are taken, at most.
const SAMPLES: u32 = 100;
/// What the server sends on each connection.
const GREETING: &[u8] = b"flow";

pub(super) fn run(stage: &Stage, times: u32) -> anyhow::Result<bool> {
    println!("soak flows: {times} connections; {}", stage.describe());
    let this = std::env::current_exe()?;
    let this = this.to_str().context("the path of this program is no text")?;
    let mut server = stage.start(&["--name", "server"], &[this, "flow-peer", "serve"])?;
    let driver = server.process("driver")?;
    let count = times.to_string();
    let mut client =
        stage.start(&["--name", "client"], &[this, "flow-peer", "connect", "server", &count])?;
    let mut series = [
        Series::new("driver domain", driver),
        Series::new("server's frontend", server.process("frontend")?),
        Series::new("client's frontend", client.process("frontend")?),
    ];
    let start = Instant::now();
    let said = client.launcher.stdout.take().context("the client has no output")?;
    let mut done = 0;
    // The client says how many it has had, while it still is there.
    for line in BufReader::new(said).lines() {
        done = line?.parse().context("what the client says is no number")?;
        for series in series.iter_mut().filter(|_| done < times) {
            series.sample(done)?;
        }
    }
    let status = client.launcher.wait()?;
    println!("{done} connections in {:.1?}; the client: {status}", start.elapsed());
    let flat = judge(&series);
    server.end()?;
    Ok(flat && status.success() && done == times)
}

/// Accepts, greets, closes; for ever.
pub(super) fn serve() -> anyhow::Result<bool> {
    let listener = TcpListener::bind(("::", PORT))?;
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for connection in listener.incoming().flatten() {
                    // The client counts what it does not get.
                    let _ = (&connection).write_all(GREETING);
                }
            });
        }
    });
    Ok(false)
}

/// Connects, reads the greeting to its end, closes; says now and then how many times.
pub(super) fn connect(host: &str, times: u32) -> anyhow::Result<bool> {
    let address = (host, PORT).to_socket_addrs()?.next().context("the server has no address")?;
    let every = (times / SAMPLES).max(1);
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let own = times / THREADS + u32::from(number < times % THREADS);
            let tell = tell.clone();
            scope.spawn(move || {
                for outcome in (0..own).map(|_| visit(address)) {
                    let failed = outcome.is_err();
                    // Nobody hears any more once another has failed.
                    if tell.send(outcome).is_err() || failed {
                        return;
                    }
                }
            });
        }
        drop(tell);
        for (done, outcome) in (1..).zip(told) {
            outcome.with_context(|| format!("connection {done}"))?;
            if done % every == 0 || done == times {
                println!("{done}");
            }
        }
        Ok(true)
    })
}

/// One connection.
fn visit(address: SocketAddr) -> anyhow::Result<()> {
    let mut heard = Vec::new();
    TcpStream::connect(address)?.read_to_end(&mut heard)?;
    anyhow::ensure!(heard == GREETING, "the server said {heard:?}");
    Ok(())
}
