//! Handling of each request type: the reply, and the changes and events that follow.

use super::{ConnectionId, StoreConnection, StoreServer};
use crate::access::{Change, Mutation};
use crate::path::NodePath;
use crate::quota::{Quota, QuotaRefusal, TOKEN_MAX};
use crate::transaction::Transaction;
use crate::tree::{Node, Tree};
use crate::watch::Watch;
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{
    ErrorName, Header, MessageType, PAYLOAD_MAX, Path, PathError, StoreRequest, WatchPath,
    domain_path, emit_permissions,
};
use std::sync::Arc;

/// Payload of a successful reply, and the effect after it is queued.
pub(super) struct StoreAnswer {
    pub(super) payload: Vec<u8>,
    pub(super) effect: Effect,
}

/// Effects of a request on watches.
pub(super) enum Effect {
    None,
    /// The nodes in the list changed; the tree is the one before the changes.
    Changed(Tree, Vec<Change>),
    /// A watch was set, with this path and token.
    WatchSet(String, Box<[u8]>),
}

impl StoreAnswer {
    fn with(payload: Vec<u8>) -> StoreAnswer {
        StoreAnswer { payload, effect: Effect::None }
    }

    fn ok_with(effect: Effect) -> StoreAnswer {
        StoreAnswer { payload: b"OK\0".to_vec(), effect }
    }

    fn ok() -> StoreAnswer {
        StoreAnswer::ok_with(Effect::None)
    }
}

impl StoreServer {
    /// Executes one request. The caller applies the returned [`Effect`].
    pub(super) fn answer(
        &mut self,
        id: ConnectionId,
        header: &Header,
        payload: &[u8],
    ) -> Result<StoreAnswer, QuotaRefusal> {
        let actor = self.connection(id)?.actor;
        let request = StoreRequest::parse(header.kind, payload).map_err(|error| {
            let name = error.error_name();
            let reserved =
                name == ErrorName::NotImplemented && reserved_for_toolstacks(header.kind);
            if reserved && !actor.privileged { ErrorName::Access } else { name }
        })?;
        let tx = header.tx_id;
        let at = |path: Path<'_>| NodePath::resolve(path, actor.domain).map_err(invalid);
        match request {
            StoreRequest::Directory { path } => self.read(id, tx, &at(path)?, directory),
            StoreRequest::DirectoryPart { path, offset } => {
                self.read(id, tx, &at(path)?, |node| directory_part(node, offset))
            }
            StoreRequest::Read { path } => {
                self.read(id, tx, &at(path)?, |node| Ok(node.value().to_vec()))
            }
            StoreRequest::GetPerms { path } => self.read(id, tx, &at(path)?, |node| {
                let mut list = Vec::new();
                emit_permissions(node.permissions(), &mut list);
                Ok(list)
            }),
            StoreRequest::Write { path, value } => {
                self.mutate(id, tx, Mutation::Write(at(path)?, Arc::from(value)))
            }
            StoreRequest::Mkdir { path } => self.mutate(id, tx, Mutation::Create(at(path)?)),
            StoreRequest::Rm { path } => self.mutate(id, tx, Mutation::Remove(at(path)?)),
            StoreRequest::SetPerms { path, permissions } => {
                self.mutate(id, tx, Mutation::SetPermissions(at(path)?, permissions))
            }
            StoreRequest::Watch { path, token, depth } => self.watch(id, path, token, depth),
            StoreRequest::Unwatch { path, token } => self.unwatch(id, path, token),
            StoreRequest::ResetWatches => self.reset(id),
            StoreRequest::TransactionStart => self.start_transaction(id, tx),
            StoreRequest::TransactionEnd { commit } => self.end_transaction(id, tx, commit),
            StoreRequest::GetDomainPath { domain } => {
                Ok(StoreAnswer::with(format!("{}\0", domain_path(domain)).into()))
            }
            StoreRequest::IsDomainIntroduced { domain } => {
                let known = self.introduced.contains(&domain);
                Ok(StoreAnswer::with(if known { b"T\0" } else { b"F\0" }.to_vec()))
            }
        }
    }

    fn connection(&mut self, id: ConnectionId) -> Result<&mut StoreConnection, ErrorName> {
        // Called only while a request of this connection is handled, so the connection exists.
        self.connections.get_mut(&id).ok_or(ErrorName::Io)
    }

    /// Builds a reply from the node at `path`, as the transaction `tx` sees it; 0 is no transaction.
    fn read(
        &mut self,
        id: ConnectionId,
        tx: u32,
        path: &NodePath,
        answer: impl FnOnce(&Node) -> Result<Vec<u8>, ErrorName>,
    ) -> Result<StoreAnswer, QuotaRefusal> {
        let connection = self.connections.get_mut(&id).ok_or(ErrorName::Io)?;
        let actor = connection.actor;
        let tree = if tx == 0 {
            &self.tree
        } else {
            let open = connection.transactions.get_mut(&tx);
            let open = open.ok_or(ErrorName::NotFound)?;
            open.tree_for_read(path, actor, &self.limits)?
        };
        Ok(StoreAnswer::with(answer(actor.read(tree, path)?)?))
    }

    fn mutate(
        &mut self,
        id: ConnectionId,
        tx: u32,
        mutation: Mutation,
    ) -> Result<StoreAnswer, QuotaRefusal> {
        let connection = self.connections.get_mut(&id).ok_or(ErrorName::Io)?;
        let actor = connection.actor;
        if tx != 0 {
            let open = connection.transactions.get_mut(&tx);
            let open = open.ok_or(ErrorName::NotFound)?;
            open.apply(mutation, actor, &self.limits)?;
            return Ok(StoreAnswer::ok());
        }
        let before = self.tree.clone();
        let mut changes = Vec::new();
        mutation.apply(&mut self.tree, actor, &self.limits, &mut changes)?;
        Ok(StoreAnswer::ok_with(Effect::Changed(before, changes)))
    }

    fn watch(
        &mut self,
        id: ConnectionId,
        path: WatchPath<'_>,
        token: &[u8],
        depth: Option<u32>,
    ) -> Result<StoreAnswer, QuotaRefusal> {
        let actor = self.connection(id)?.actor;
        let key = watch_key(path, actor.domain)?;
        if token.len() > TOKEN_MAX {
            return Err(ErrorName::Invalid.into());
        }
        if self.watches.contains(&key, id, token) {
            return Err(ErrorName::Exists.into());
        }
        if !actor.privileged && self.watches.count(actor.domain) >= self.limits.watches {
            return Err(Quota::Watches.into());
        }
        let watch = Watch {
            connection: id,
            actor,
            token: token.into(),
            depth,
            relative: matches!(path, WatchPath::Node(path) if !path.is_absolute()),
        };
        self.watches.insert(&key, watch);
        let event = Effect::WatchSet(path.as_str().to_owned(), token.into());
        Ok(StoreAnswer::ok_with(event))
    }

    fn unwatch(
        &mut self,
        id: ConnectionId,
        path: WatchPath<'_>,
        token: &[u8],
    ) -> Result<StoreAnswer, QuotaRefusal> {
        let key = watch_key(path, self.connection(id)?.actor.domain)?;
        if self.watches.remove(&key, id, token) {
            Ok(StoreAnswer::ok())
        } else {
            Err(ErrorName::NotFound.into())
        }
    }

    fn reset(&mut self, id: ConnectionId) -> Result<StoreAnswer, QuotaRefusal> {
        self.connection(id)?.transactions.clear();
        self.watches.remove_all(id);
        self.end_exclusive(id, None);
        Ok(StoreAnswer::ok())
    }

    fn start_transaction(
        &mut self,
        id: ConnectionId,
        tx: u32,
    ) -> Result<StoreAnswer, QuotaRefusal> {
        let actor = self.connection(id)?.actor;
        if tx != 0 {
            let nested = self.connection(id)?.transactions.contains_key(&tx);
            let error = if nested { ErrorName::Busy } else { ErrorName::NotFound };
            return Err(error.into());
        }
        let open = self.of_domain(actor.domain);
        let open: usize = open.map(|(_, each)| each.transactions.len()).sum();
        if !actor.privileged && open >= self.limits.transactions {
            return Err(Quota::Transactions.into());
        }
        let transaction = Transaction::new(&self.tree);
        let connection = self.connection(id)?;
        let mut new = connection.next_transaction;
        while new == 0 || connection.transactions.contains_key(&new) {
            new = new.wrapping_add(1);
        }
        connection.next_transaction = new.wrapping_add(1);
        connection.transactions.insert(new, transaction);
        if connection.conflicted && self.exclusive.is_none() {
            self.exclusive = Some((id, new));
        }
        Ok(StoreAnswer::with(format!("{new}\0").into()))
    }

    fn end_transaction(
        &mut self,
        id: ConnectionId,
        tx: u32,
        commit: bool,
    ) -> Result<StoreAnswer, QuotaRefusal> {
        self.end_exclusive(id, Some(tx));
        let connection = self.connections.get_mut(&id).ok_or(ErrorName::Io)?;
        let ended = connection.transactions.remove(&tx);
        let ended = ended.ok_or(ErrorName::NotFound)?;
        if !commit {
            return Ok(StoreAnswer::ok());
        }
        let outcome = ended.commit(&self.tree, connection.actor, &self.limits);
        let conflict = matches!(outcome, Err(QuotaRefusal::Error(ErrorName::Again)));
        connection.conflicted = conflict && connection.actor.privileged;
        let (tree, changes) = outcome?;
        let before = std::mem::replace(&mut self.tree, tree);
        Ok(StoreAnswer::ok_with(Effect::Changed(before, changes)))
    }

    /// Resumes the unprivileged connections if transaction `tx` of this connection paused them. `None`
    /// stands for every transaction of the connection.
    pub(super) fn end_exclusive(&mut self, id: ConnectionId, tx: Option<u32>) {
        if let Some((holder, held)) = self.exclusive
            && holder == id
            && tx.is_none_or(|tx| tx == held)
        {
            self.exclusive = None;
        }
    }
}

/// Returns `true` for requests that the protocol reserves for toolstacks. The host calls
/// [`StoreServer::introduce`] and [`StoreServer::release`] instead.
fn reserved_for_toolstacks(kind: MessageType) -> bool {
    matches!(
        kind,
        MessageType::Control
            | MessageType::Introduce
            | MessageType::Release
            | MessageType::Resume
            | MessageType::SetTarget
    )
}

fn invalid(_: PathError) -> ErrorName {
    ErrorName::Invalid
}

/// Returns the key of a watch: the absolute path or the special name.
fn watch_key(path: WatchPath<'_>, caller: DomId) -> Result<String, ErrorName> {
    match path {
        WatchPath::Node(path) => path.to_absolute(caller).map_err(invalid),
        special => Ok(special.as_str().to_owned()),
    }
}

fn directory(node: &Node) -> Result<Vec<u8>, ErrorName> {
    let len: usize = node.names().map(|name| name.len() + 1).sum();
    if len > PAYLOAD_MAX as usize {
        return Err(ErrorName::TooBig);
    }
    let mut listing = Vec::with_capacity(len);
    for name in node.names() {
        listing.extend_from_slice(name.as_bytes());
        listing.push(0);
    }
    Ok(listing)
}

/// Encodes a part of a listing: the node's generation, then as many whole names from byte `offset` of
/// the listing on as fit. An empty name marks the end of the listing.
fn directory_part(node: &Node, offset: u32) -> Result<Vec<u8>, ErrorName> {
    let mut part = format!("{}\0", node.generation()).into_bytes();
    let len_max = PAYLOAD_MAX as usize - 1;
    let mut skip = usize::try_from(offset).map_err(|_| ErrorName::Invalid)?;
    for name in node.names() {
        let Some(rest) = name.as_bytes().get(skip..) else {
            skip -= name.len() + 1;
            continue;
        };
        skip = 0;
        if part.len() + rest.len() + 1 > len_max {
            return Ok(part);
        }
        part.extend_from_slice(rest);
        part.push(0);
    }
    part.push(0);
    Ok(part)
}
