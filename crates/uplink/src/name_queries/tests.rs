use core::net::{Ipv4Addr, SocketAddr};

use ringfence_policy::Protocol;
use ringfence_policy::gate::QueryEnds;

use super::*;
use crate::config::Config;
use crate::counters::UplinkCounters;
use crate::host::Host;
use crate::host::scripted::{REFUSES, SILENT, ScriptedHost};
use crate::name_query::QueryClient;
use crate::replies::Replies;

const NOW: Duration = Duration::from_secs(1000);

/// Queries of an engine, with the server's port. Port 53 echoes the query.
struct Fixture {
    queries: NameQueries,
    host: ScriptedHost,
    config: Config,
    counters: UplinkCounters,
}

macro_rules! context {
    ($fixture:ident, $now:expr) => {
        Context {
            config: &$fixture.config,
            egress: &None,
            host: &mut $fixture.host,
            replies: &mut Replies::default(),
            queries: &mut Vec::new(),
            held: &mut crate::held::HeldPackets::default(),
            counters: &$fixture.counters,
            now: $now,
        }
    };
}

impl Fixture {
    fn new() -> Fixture {
        Fixture {
            queries: NameQueries::default(),
            host: ScriptedHost::new(100).unwrap(),
            config: Config::default(),
            counters: UplinkCounters::default(),
        }
    }

    fn start(&mut self, port: u16, query: &[u8]) {
        let guest = (Ipv4Addr::new(10, 0, 0, 2), 4000).into();
        let server = SocketAddr::from((Ipv4Addr::new(10, 0, 0, 1), port));
        let ends = QueryEnds { guest, server, over: Protocol::Udp };
        let client = QueryClient::Datagram([2, 0, 0, 0, 0, 2]);
        let query = NameQuery { ends, server, query: query.to_vec(), client };
        self.queries.start(query, &mut context!(self, NOW));
    }

    /// Handles the events of sockets. Returns the answers of the queries that are over.
    fn settle(&mut self) -> Vec<Option<Vec<u8>>> {
        let mut events = Vec::new();
        for _ in 0..4 {
            self.host.poll(&mut events, Some(Duration::ZERO)).unwrap();
            for ready in core::mem::take(&mut events) {
                self.queries.ready(ready, &mut context!(self, NOW));
            }
        }
        self.queries.take_answered().into_iter().map(|answered| answered.answer).collect()
    }
}

#[test]
fn query_is_sent_with_its_length_and_the_answer_is_read() {
    let mut fixture = Fixture::new();
    fixture.start(53, b"query");
    fixture.start(53, b"another one");
    let answers = fixture.settle();
    assert_eq!(answers, [Some(b"query".to_vec()), Some(b"another one".to_vec())]);
    assert_eq!(fixture.queries.deadline(), None);
}

#[test]
fn server_that_refuses_or_is_silent_ends_the_query() {
    let mut fixture = Fixture::new();
    fixture.start(REFUSES, b"query");
    assert_eq!(fixture.settle(), [None]);
    fixture.start(SILENT, b"query");
    assert_eq!(fixture.settle(), []);
    assert_eq!(fixture.queries.deadline(), Some(NOW + ANSWER_WITHIN));
    fixture
        .queries
        .run_timers(&mut context!(fixture, NOW + ANSWER_WITHIN - Duration::from_millis(1)));
    assert_eq!(fixture.settle(), []);
    fixture.queries.run_timers(&mut context!(fixture, NOW + ANSWER_WITHIN));
    assert_eq!(fixture.settle(), [None]);
}

#[test]
fn query_beyond_the_limit_ends_at_once() {
    let mut fixture = Fixture::new();
    for _ in 0..QUERIES_MAX {
        fixture.start(SILENT, b"query");
    }
    assert_eq!(fixture.settle(), []);
    fixture.start(53, b"query");
    assert_eq!(fixture.settle(), [None]);
    fixture.queries.run_timers(&mut context!(fixture, NOW + ANSWER_WITHIN));
    assert_eq!(fixture.settle().len(), QUERIES_MAX);
    fixture.start(53, b"query");
    assert_eq!(fixture.settle(), [Some(b"query".to_vec())]);
}
